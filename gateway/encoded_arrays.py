"""JSON arrays that are encoded as they grow, so that no body with a long one is encoded in one piece."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any

from pydantic_core import PydanticSerializationError, to_json

#: Stands for an array while the body around it is encoded. Nobody's text contains it, because nobody knows it.
_MARK = secrets.token_hex(16)


class EncodedArray:
    """An array. bytes_: of what it holds."""

    __slots__ = ("_pieces", "bytes_")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self.bytes_ = 0

    def add(self, values: Sequence[Any]) -> int:
        """Append these; the bytes that they take."""
        if not values:
            return 0
        piece = encoded(values)[1:-1]
        self._pieces.append(piece)
        self.bytes_ += len(piece)
        return len(piece)

    def json(self) -> bytes:
        """The array."""
        return b"[" + b",".join(self._pieces) + b"]"


def encoded(body: Any) -> bytes:
    """`body`, which may have such arrays, as JSON on one line."""
    arrays: list[EncodedArray] = []

    def marked(value: Any) -> str:
        if not isinstance(value, EncodedArray):
            raise TypeError(f"no JSON: {type(value)}")
        arrays.append(value)
        return _MARK

    try:
        made = to_json(body, fallback=marked)  # a quarter of the time
    except PydanticSerializationError:  # half of a surrogate pair, which a client sent
        arrays.clear()
        encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=marked)
        made = encoder.encode(body).encode("utf-8", "replace")
    if not arrays:
        return made
    parts = made.split(b'"' + _MARK.encode() + b'"')
    return b"".join(part for pair in zip(parts, [*(a.json() for a in arrays), b""], strict=True) for part in pair)
