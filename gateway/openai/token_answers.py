"""The answers of `POST /tokenize` and `POST /detokenize`, as pieces of JSON: encoding a million ids takes a tenth of a
second, which must not block the event loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gateway.sse import encoded

#: Ids or texts per piece, and characters per piece.
SLICE, SLICE_CHARS = 4096, 64 << 10


def tokenized(tokens: Sequence[int], token_strs: Sequence[str] | None, max_model_len: int) -> Iterator[bytes]:
    """vLLM's answer to `/tokenize`. token_strs: None: not requested."""
    yield b'{"count":%d,"max_model_len":%d,"tokens":' % (len(tokens), max_model_len)
    yield from _list(tokens)
    yield b',"token_strs":'
    if token_strs is None:
        yield b"null"
    else:
        yield from _list(token_strs)
    yield b"}"


def detokenized(text: str) -> Iterator[bytes]:
    """vLLM's answer to `/detokenize`."""
    yield b'{"prompt":"'
    for at in range(0, len(text), SLICE_CHARS):
        yield encoded(text[at : at + SLICE_CHARS])[1:-1]
    yield b'"}'


def _list(values: Sequence[Any]) -> Iterator[bytes]:
    yield b"["
    for at in range(0, len(values), SLICE):
        yield (b"," if at else b"") + encoded(list(values[at : at + SLICE]))[1:-1]
    yield b"]"
