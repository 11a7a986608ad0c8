"""Server-sent events: what a stream of chunks looks like on the wire."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from contracts.errors import RequestError

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # Proxies such as nginx would collect the tokens otherwise.
    "X-Accel-Buffering": "no",
}
DONE = b"data: [DONE]\n\n"


_ENCODE = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
#: Stands for a text in `TextEvents`; no other part of a chunk holds it.
_TEXT = "\0text\0"


def event(body: Any) -> bytes:
    """One event holding `body` as JSON on one line."""
    return b"data: " + encoded(body) + b"\n\n"


def encoded(body: Any) -> bytes:
    """`body` as JSON on one line."""
    return _ENCODE(body).encode("utf-8", "replace")


class TextEvents:
    """Events that differ in one text only, so that what is around it is encoded once. body_of: the body for a text."""

    def __init__(self, body_of: Callable[[str], Any]) -> None:
        self._before, self._after = event(body_of(_TEXT)).split(_ENCODE(_TEXT).encode())

    def event(self, text: str) -> bytes:
        """As `event(body_of(text))`."""
        return self._before + _ENCODE(text).encode("utf-8", "replace") + self._after


def failure(error: RequestError) -> bytes:
    """The event that ends a stream which cannot go on."""
    return event(error.envelope())
