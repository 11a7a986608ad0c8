"""A model's vocabulary in llguidance's form, and the limits of that library. Imports no torch, as helper processes use
it too."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgpack
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

#: Limits of a mask on the engine's thread: 50,000 units of fuel take about 4 ms, 50,000 items 2.5 ms. Lexer states (1
#: to 2 kB each) add up over an answer, to about 0.1 s and 40 MB.
LIMITS = LLParserLimits(step_lexer_fuel=50_000, max_lexer_states=20_000, verbose_errors=False)
#: Only this much of forced text is tokenised, as the library needs its first token only.
_FORCED_CHARACTERS = 512
_MAX_REASON_CHARS = 300
_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")


@dataclass(frozen=True, slots=True)
class Spellings:
    """tokens: bytes of every token. special: ids without text. ends: ids that end a text, at least one."""

    tokens: list[bytes]
    special: list[int]
    ends: list[int]

    def packed(self) -> bytes:
        """Encoded for `unpacked`."""
        packed: bytes = msgpack.packb([self.tokens, self.special, self.ends])
        return packed


def unpacked(packed: bytes) -> Spellings:
    """The inverse of `Spellings.packed`."""
    return Spellings(*msgpack.unpackb(packed))


def tables(spellings: Spellings, plain_tokens: Callable[[str], list[int]] | None = None) -> LLTokenizer:
    """The library's tables of the vocabulary. plain_tokens: tokenises a text; None: take the longest matching
    tokens."""
    described = _Vocabulary(spellings, plain_tokens)
    return LLTokenizer(TokenizerWrapper(described), n_vocab=len(spellings.tokens), eos_token=spellings.ends)


def compiled(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """The compiled grammar in its initial state, possibly with an error. Releases Python's lock."""
    return LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)


def reason(matcher: LLMatcher) -> str:
    """The library's error message, without its state and position; empty: no error."""
    words = matcher.get_error().split("<state>")[0].split("\n")[0]
    return _PLACE.sub("", words).strip()[:_MAX_REASON_CHARS]


class _Vocabulary:
    """The tokenizer interface that the library requires."""

    bos_token_id = None

    def __init__(self, spellings: Spellings, plain_tokens: Callable[[str], list[int]] | None) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = spellings.tokens, spellings.special, spellings.ends[0]
        self._plain_tokens = plain_tokens
        self._ids: dict[bytes, int] = {}

    def __call__(self, text: str) -> list[int]:
        """Tokens with exactly the bytes of the beginning of `text`: the tokenizer's result, unless it adds a space,
        normalises or produces special tokens; then the longest matching tokens, one by one."""
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
            self._ids = {
                spelled: token for token, spelled in enumerate(self.tokens) if spelled and token not in special
            }
        longest, tokens, at = max(map(len, self._ids)), list[int](), 0
        while at < len(data):
            found = next((n for n in range(min(longest, len(data) - at), 0, -1) if data[at : at + n] in self._ids), 0)
            if not found:  # the vocabulary lacks this byte: the library stops here
                break
            tokens.append(self._ids[data[at : at + found]])
            at += found
        return tokens
