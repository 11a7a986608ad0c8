"""Server-sent events: what a stream of chunks looks like on the wire, and how few writes it takes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web
from pydantic_core import PydanticSerializationError, to_json

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
    try:
        return to_json(body)  # a quarter of the time
    except PydanticSerializationError:  # half a character, from a client that sent it so
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


class EventStream(web.StreamResponse):
    """A response of events. A write is a system call, and what else it costs is little: headers go with the first events, what is kept goes
    with the next ones, and the last ones with the end."""

    #: aiohttp's own word for it; were it gone, headers would go by themselves again.
    _send_headers_immediately = False

    def __init__(self, headers: Mapping[str, str]) -> None:
        super().__init__(headers={**HEADERS, **headers})
        self._kept: list[bytes] = []

    def keep(self, events: bytes) -> None:
        """Send them with the next ones."""
        self._kept.append(events)

    async def send(self, events: bytes = b"") -> None:
        """Send them now, after what is kept. The headers go even when there is nothing else."""
        await self.write(self._all(events))

    async def end(self, events: bytes) -> None:
        """Send them after what is kept, and nothing more."""
        await self.write_eof(self._all(events))

    def _all(self, events: bytes) -> bytes:
        if self._kept:
            events = b"".join([*self._kept, events])
            self._kept.clear()
        return events
