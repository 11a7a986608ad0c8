"""One connection: aiohttp's protocol with the deadlines that it lacks (`core.deadlines`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from aiohttp import web

from contracts.errors import InvalidRequest
from gateway import metrics
from gateway.core.deadlines import Deadlines, Limits


class Connection(web.RequestHandler):
    """Serves the transport given to `connection_made`; calls `left` once when the transport is closed."""

    __slots__ = ("_left", "_line", "deadlines")

    def __init__(self, server: web.Server, limits: Limits, left: Callable[[Connection], None], **options: Any) -> None:
        """options: those of aiohttp's `web.AppRunner`."""
        loop = asyncio.get_running_loop()
        super().__init__(server, loop=loop, **options)
        self.deadlines = Deadlines(limits, loop.time())
        self._left = left
        #: The transport while it is open; aiohttp drops its reference when closing begins.
        self._line: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's.
        self._line = cast(asyncio.Transport, transport)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._line = None
        super().connection_lost(exc)
        self._left(self)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if data:
            self.deadlines.heard(self._loop.time())

    def resume_writing(self) -> None:
        super().resume_writing()
        self.deadlines.took()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Malformed HTTP: answer it in the error envelope and close the connection, because the start of the next
        request is unknown."""
        response = super().handle_error(request, status, exc, message)  # raises when an answer has begun
        if status < 500:
            error = InvalidRequest(f"this is no HTTP request: {_first_line(message)}", code="http_error")
            response = web.json_response(error.envelope(), status=status)
            response.force_close()
        return response

    def look(self, now_s: float) -> None:
        """Close the connection if a deadline has passed. A running request is cancelled, as when the client
        disconnects."""
        if self._line is None:
            return
        late = self.deadlines.late(now_s, self._line.get_write_buffer_size())
        if late is not None:
            metrics.CUT.labels(late).inc()
            self._line.abort()  # close() would wait until everything is sent


def _first_line(message: str | None) -> str:
    return (message or "").split("\n")[0].strip(" :") or "it could not be read"
