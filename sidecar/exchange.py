"""One HTTP/1.1 request and its answer on a connection of its own, parsed by httptools: what an answer's pieces cost is
most of what the sidecar does, and a general client does several times as much for each.

It neither follows redirects nor decodes. Whatever is no HTTP breaks the exchange.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import httptools

#: Bytes of an answer that are read ahead of whom they are for.
AHEAD_BYTES = 64 << 10
#: Bytes that come before the head is complete.
MOST_HEAD_BYTES = 64 << 10
_NO_BODY = frozenset({204, 304})


class Broken(ConnectionError):
    """The connection ended within the answer, or what came is no HTTP."""


class Exchange(asyncio.Protocol):
    """See the module. `close` it, whatever happens. status, headers: of the answer, once `begin` has returned.

    Invariant: reading is paused while more than `AHEAD_BYTES` wait in `_pieces`."""

    def __init__(self, host: str) -> None:
        self.status = 0
        self.headers: list[tuple[str, str]] = []
        self._host, self._transport = host, cast(asyncio.Transport, None)
        self._parser, self._head_bytes = httptools.HttpResponseParser(self), 0
        self._pieces: deque[bytes] = deque()
        self._waiting_bytes, self._paused = 0, False
        self._complete = False
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None

    # ---- what is asked -----------------------------------------------------------------------------------------
    @classmethod
    async def connect(cls, place: Path | str) -> Exchange:
        """A connection to a socket, or to the host of an http URL. Raises OSError."""
        loop = asyncio.get_running_loop()
        if isinstance(place, Path):
            return (await loop.create_unix_connection(lambda: cls("vllm"), str(place)))[1]
        url = urlsplit(place)
        return (await loop.create_connection(lambda: cls(url.netloc), url.hostname or "", url.port or 80))[1]

    async def begin(self, path: str, headers: Mapping[str, str], body: bytes) -> None:
        """Send a POST and return once the head of its answer is here. Raises Broken."""
        lines = [f"POST {path} HTTP/1.1", f"host: {self._host}", f"content-length: {len(body)}", "connection: close"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._transport.write("\r\n".join([*lines, "\r\n"]).encode("latin-1"))
        self._transport.write(body)
        while not self.status:
            await self._more()

    async def read(self) -> bytes:
        """What has come of the body, at least a byte; empty: it is complete. Raises Broken."""
        while not self._pieces:
            if self._complete:
                return b""
            await self._more()
        piece = self._pieces.popleft() if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._waiting_bytes = 0
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        return piece

    def close(self) -> None:
        """End the connection."""
        self._transport.abort()

    @property
    def content_type(self) -> str:
        """Without parameters, in lower case."""
        return next((v for n, v in self.headers if n == "content-type"), "").partition(";")[0].strip().lower()

    async def _more(self) -> None:
        if self._error is not None:
            raise self._error
        self._reader = asyncio.get_running_loop().create_future()
        await self._reader

    # ---- what comes --------------------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        if self._complete or self._error is not None:
            return
        try:
            self._parser.feed_data(data)
            if not self.status:
                self._head_bytes += len(data)
                if self._head_bytes > MOST_HEAD_BYTES:
                    raise ValueError("a head that is too long")
        except (httptools.HttpParserError, ValueError) as e:
            if not self._complete:
                self._break(Broken(f"what it answers is no HTTP: {e}"))
            self.close()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        if self._ends_with_connection and exc is None:
            self._complete = True
        elif not self._complete:
            self._break(Broken(str(exc or "Server disconnected")))
        self._wake()

    def _break(self, error: Exception) -> None:
        self._error = self._error or error

    def _wake(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)

    # ---- httptools calls these ---------------------------------------------------------------------------------
    def on_header(self, name: bytes, value: bytes) -> None:
        """A header of the answer, or of what is said before it."""
        self.headers.append((name.decode("latin-1").lower(), value.decode("latin-1").rstrip(" \t")))

    def on_headers_complete(self) -> None:
        """The head is here."""
        status = self._parser.get_status_code()
        if status < 200:
            self.headers.clear()  # another head follows
            return
        codings = [value.lower() for name, value in self.headers if name == "transfer-encoding"]
        if codings not in ([], ["chunked"]):
            raise ValueError(f"the coding {codings}")
        self.status = status
        self._complete = status in _NO_BODY

    def on_body(self, piece: bytes) -> None:
        """A part of the body."""
        self._pieces.append(piece)
        self._waiting_bytes += len(piece)
        if self._waiting_bytes > AHEAD_BYTES and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        """The answer is complete, or what is said before it."""
        self._complete = self._complete or self.status > 0

    @property
    def _ends_with_connection(self) -> bool:
        framed = any(name in ("content-length", "transfer-encoding") for name, _ in self.headers)
        return self.status > 0 and not framed
