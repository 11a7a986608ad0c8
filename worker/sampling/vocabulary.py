"""A model's tokens as llguidance wants them, and the limits under which it works. Imports no torch: helper processes use it, too."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgpack
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

#: What bounds a mask on the engine's thread: 50,000 units of fuel are about 4 ms, 50,000 items 2.5 ms. A lexer's states (1 to 2 kB each)
#: add up over an answer, and with them the time and the memory that its masks take: about 0.1 s and 40 MB in all.
LIMITS = LLParserLimits(step_lexer_fuel=50_000, max_lexer_states=20_000, verbose_errors=False)
#: Text that a grammar forces is told as tokens for its first token's sake: a longer one is not read to its end for every token.
_FORCED_CHARACTERS = 512
_MAX_REASON_CHARS = 300
_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")


@dataclass(frozen=True, slots=True)
class Spellings:
    """The bytes of every token; those that are no text; those that end one (one at least)."""

    tokens: list[bytes]
    special: list[int]
    ends: list[int]

    def packed(self) -> bytes:
        """Bytes that `unpacked` reads."""
        packed: bytes = msgpack.packb([self.tokens, self.special, self.ends])
        return packed


def unpacked(packed: bytes) -> Spellings:
    """What `Spellings.packed` wrote."""
    return Spellings(*msgpack.unpackb(packed))


def tables(spellings: Spellings, plain_tokens: Callable[[str], list[int]] | None = None) -> LLTokenizer:
    """The vocabulary's tables. plain_tokens: the tokenizer's own choice for a text; None: the longest tokens that fit."""
    described = _Vocabulary(spellings, plain_tokens)
    return LLTokenizer(TokenizerWrapper(described), n_vocab=len(spellings.tokens), eos_token=spellings.ends)


def compiled(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """The grammar at its beginning; it may be in error. Releases Python's lock."""
    return LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)


def reason(matcher: LLMatcher) -> str:
    """Why it is in error: the library's words without its state and its place in our grammar. Empty: it is not."""
    words = matcher.get_error().split("<state>")[0].split("\n")[0]
    return _PLACE.sub("", words).strip()[:_MAX_REASON_CHARS]


class _Vocabulary:
    """What the library asks a tokenizer for."""

    bos_token_id = None

    def __init__(self, spellings: Spellings, plain_tokens: Callable[[str], list[int]] | None) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = spellings.tokens, spellings.special, spellings.ends[0]
        self._plain_tokens = plain_tokens
        self._ids: dict[bytes, int] = {}

    def __call__(self, text: str) -> list[int]:
        """Tokens whose bytes are those with which `text` begins: the tokenizer's own choice, unless it adds a space in front, normalises,
        or takes a special token's spelling for the token; then the longest that fit, one by one."""
        text = text[:_FORCED_CHARACTERS]
        data = text.encode()
        if self._plain_tokens is not None:
            tokens = self._plain_tokens(text)
            if b"".join(self.tokens[token] for token in tokens) == data and not self._any_special(tokens):
                return tokens
        return self._longest(data)

    def _any_special(self, tokens: Sequence[int]) -> bool:
        return not set(self.special_token_ids).isdisjoint(tokens)

    def _longest(self, data: bytes) -> list[int]:
        if not self._ids:
            special = set(self.special_token_ids)
            self._ids = {spelled: token for token, spelled in enumerate(self.tokens) if spelled and token not in special}
        longest, tokens, at = max(map(len, self._ids)), list[int](), 0
        while at < len(data):
            found = next((n for n in range(min(longest, len(data) - at), 0, -1) if data[at : at + n] in self._ids), 0)
            if not found:  # a vocabulary without this byte: the library gives up on what it cannot spell
                break
            tokens.append(self._ids[data[at : at + found]])
            at += found
        return tokens
