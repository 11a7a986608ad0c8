"""Upper bound on the bytes of text that one token can stand for, from tokenizer.json.

It is the longest spelling of a token, times the factor by which normalising may shrink text. If text can vanish
(removed space, characters without a token) there is no bound, and the result is 0.
"""

from __future__ import annotations

from typing import Any

#: Maximum ratio of text to its normal form, in bytes. NFC: three Hangul letters of 3 bytes make a syllable of 3; a
#: 3-byte iota and two 2-byte marks make a letter of 2. NFKC and NFKD map characters of up to 4 bytes to ASCII, and
#: combine marks.
_SHRINKS = {"NFC": 4, "NFD": 4, "NFKC": 12, "NFKD": 12}
#: Pre-tokenizers that split text without losing any.
_CUTTERS = ("ByteLevel", "Digits", "Metaspace")


def most_bytes_of_a_token(description: dict[str, Any], longest_spelling: int) -> int:
    """description: tokenizer.json. longest_spelling: bytes of the longest token, including special ones. Returns 0 if
    unbounded or unknown."""
    factor = _shrink(description.get("normalizer"))
    whole = _cuts(description.get("pre_tokenizer")) and _spells_everything(description)
    takes_space = any(token.get("lstrip") or token.get("rstrip") for token in description.get("added_tokens") or [])
    return longest_spelling * factor if whole and not takes_space else 0


def _shrink(normalizer: dict[str, Any] | None) -> int:
    """Maximum ratio of text to its normalised form; 0: unbounded or unknown."""
    if normalizer is None:
        return 1
    kind = normalizer.get("type")
    if kind == "Sequence":
        factor = 1
        for part in normalizer.get("normalizers") or []:
            factor *= _shrink(part)
        return factor
    if kind == "Replace":
        pattern = normalizer.get("pattern")
        old = pattern.get("String") if isinstance(pattern, dict) else None
        new = normalizer.get("content")
        return int(isinstance(old, str) and isinstance(new, str) and len(new.encode()) >= len(old.encode()))
    return 1 if kind == "Prepend" else _SHRINKS.get(str(kind), 0)


def _cuts(cutter: dict[str, Any] | None) -> bool:
    if cutter is None:
        return True
    kind = cutter.get("type")
    if kind == "Sequence":
        return all(_cuts(part) for part in cutter.get("pretokenizers") or [])
    return kind in _CUTTERS or (kind in ("Split", "Punctuation") and cutter.get("behavior") != "Removed")


def _spells_everything(description: dict[str, Any]) -> bool:
    """Whether every byte has a token, so that no character is dropped and unknown runs do not become one token."""
    model = description.get("model") or {}
    vocab = model.get("vocab") or {}
    known = set(vocab) if isinstance(vocab, dict) else {entry[0] for entry in vocab}
    if model.get("byte_fallback"):
        return all(f"<0x{byte:02X}>" in known for byte in range(256))
    return _has_byte_level(description) and all(chr(code) in known for code in _BYTE_LETTERS)


def _has_byte_level(description: dict[str, Any]) -> bool:
    stages = [description.get(name) or {} for name in ("pre_tokenizer", "normalizer")]
    inner = [
        part
        for stage in stages
        for part in (stage, *(stage.get("pretokenizers") or ()), *(stage.get("normalizers") or ()))
    ]
    return any(part.get("type") == "ByteLevel" for part in inner)


#: Byte-level BPE's letters for the 256 bytes: printable Latin-1 as itself, the rest from U+0100 on.
_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_BYTE_LETTERS = _PRINTABLE | {0x100 + i for i in range(256 - len(_PRINTABLE))}
