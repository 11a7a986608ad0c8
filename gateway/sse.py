"""Server-sent events: the encoding of a stream of chunks, with few writes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from aiohttp import web

from contracts.errors import RequestError
from gateway.core.relay_routes import error_body, is_anthropic
from gateway.encoded_arrays import encoded as encoded

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # Without it, proxies such as nginx buffer the tokens.
    "X-Accel-Buffering": "no",
}
DONE = b"data: [DONE]\n\n"


_ENCODE = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
#: Placeholder for the text in `TextEvents`; no other part of a chunk contains it.
_TEXT = "\0text\0"


def event(body: Any) -> bytes:
    """One event with `body` as JSON on one line."""
    return b"data: " + encoded(body) + b"\n\n"


def comment(text: str) -> bytes:
    """A line that event readers ignore."""
    return b": " + "".join(c if c.isprintable() else "?" for c in text).encode("utf-8", "replace") + b"\n\n"


class TextEvents:
    """Events that differ in one text only; the rest is encoded once. body_of: returns the body for a text."""

    def __init__(self, body_of: Callable[[str], Any]) -> None:
        self._before, self._after = event(body_of(_TEXT)).split(_ENCODE(_TEXT).encode())

    def event(self, text: str) -> bytes:
        """Same as `event(body_of(text))`."""
        return self._before + _ENCODE(text).encode("utf-8", "replace") + self._after


def failure(error: RequestError, path: str = "") -> bytes:
    """The last event of a stream of this route that fails. Anthropic's clients read an event's name."""
    return (b"event: error\n" if is_anthropic(path) else b"") + event(error_body(error, path))


class EventStream(web.StreamResponse):
    """A response of events that saves writes, because each is a system call: headers are sent with the first events,
    kept events with the next ones, and the last ones with the end of the body."""

    #: aiohttp's attribute; if aiohttp drops it, headers are sent separately again.
    _send_headers_immediately = False

    def __init__(self, headers: Mapping[str, str]) -> None:
        super().__init__(headers={**HEADERS, **headers})
        self._kept: list[bytes] = []
        self._sent = 0

    def keep(self, events: bytes) -> None:
        """Send these events with the next ones."""
        self._kept.append(events)

    async def send(self, events: bytes = b"") -> None:
        """Send these events now, after the kept ones. Sends at least the headers."""
        self._sent += 1
        await self.write(self._all(events))

    @contextlib.asynccontextmanager
    async def kept_alive(self, every_s: float, why: Callable[[], str]) -> AsyncIterator[None]:
        """Within it, a comment is sent whenever nothing has been for this long; 0: never. why: its text."""

        async def comments() -> None:
            while True:
                before = self._sent
                await asyncio.sleep(every_s)
                if self._sent == before:
                    await self.send(comment(why()))

        task = asyncio.ensure_future(comments()) if every_s else None
        try:
            yield
        finally:
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, ConnectionError):  # its reader went away
                    await task

    async def end(self, events: bytes) -> None:
        """Send these events after the kept ones and end the response."""
        await self.write_eof(self._all(events))

    def _all(self, events: bytes) -> bytes:
        if self._kept:
            events = b"".join([*self._kept, events])
            self._kept.clear()
        return events
