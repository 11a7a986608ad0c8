"""The listening socket: limits connections, and closes those that take too long.

Connections are limited in total and per address. A connection over a limit gets a 503 and is closed before anything is
allocated for it. `Connection.look` checks the deadlines of every connection regularly. aiohttp closes connections that
complete no request for `gateway.idle_s`.
"""

from __future__ import annotations

import asyncio
import json
import resource
import ssl
from typing import Any, NoReturn, cast

from aiohttp import web

from contracts.errors import Unavailable
from gateway import metrics
from gateway.connection import Connection
from gateway.core.callers import network_of
from gateway.core.deadlines import Limits
from gateway.core.shares import Shares

#: File descriptors reserved for other uses: streams to workers and schedulers, logs, connections being refused.
_OTHER_FILES = 256
#: A refused client may still be sending, and closing with unread bytes would discard the answer. So the gateway waits
#: up to this long for the client to close, for this many refused clients at a time.
_REFUSING_S, _REFUSING = 1.0, 64
_BODY = json.dumps(Unavailable("too many connections at the moment; try again", code="overloaded").envelope()).encode()
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json; charset=utf-8\r\nRetry-After: "
    b"1\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n" % len(_BODY)
) + _BODY


class Listener:
    """Accepts connections for one process."""

    def __init__(
        self, server: web.Server, max_connections: int, share: float, limits: Limits, options: dict[str, Any]
    ) -> None:
        """share: the part of the connections that one address may hold. options: those of aiohttp's `web.AppRunner`."""
        self._server, self._limits, self._options = server, limits, options
        self.shares = Shares(max(8, min(max_connections, raised_file_limit() - _OTHER_FILES)), share)
        self._owners: dict[Connection, str] = {}
        self._refusing = 0
        self._listening: asyncio.Server | None = None
        self._secure: ssl.SSLContext | None = None
        self._handshakes: set[asyncio.Task[None]] = set()

    async def open(self, host: str, port: int, secure: ssl.SSLContext | None, *, shared: bool) -> None:
        """Listen. secure: for HTTPS. shared: other processes listen on the port too. Raises OSError naming the address
        when the port is taken."""
        self._secure = secure
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_server(
            lambda: _Accepted(self), host, port, backlog=1024, reuse_port=shared or None
        )

    async def watch(self) -> NoReturn:
        """Check every connection's deadlines, for ever."""
        loop = asyncio.get_running_loop()
        pause_s = min(2.0, self._limits.header_s / 4, self._limits.write_s / 4)
        while True:
            await asyncio.sleep(pause_s)
            now_s = loop.time()
            for connection in tuple(self._owners):
                connection.look(now_s)

    def close(self) -> None:
        """Stop accepting connections."""
        if self._listening is not None:
            self._listening.close()
            self._listening = None
        for handshake in self._handshakes:
            handshake.cancel()

    def admit(self, transport: asyncio.Transport, accepted: _Accepted) -> None:
        """Accept the connection, which aiohttp then serves, or refuse it."""
        peer = transport.get_extra_info("peername")
        owner = network_of(peer[0] if peer else None)
        if not self.shares.take(owner):
            self._refuse(transport)
            return
        if self._secure is None:
            self._serve(transport, owner)
            return
        accepted.securing = True
        handshake = asyncio.create_task(self._secured(transport, accepted, owner, self._secure), name="TLS handshake")
        self._handshakes.add(handshake)
        handshake.add_done_callback(self._handshakes.discard)

    async def _secured(
        self, transport: asyncio.Transport, accepted: _Accepted, owner: str, secure: ssl.SSLContext
    ) -> None:
        """Serve the connection after its handshake, which may take as long as a request's headers."""
        made: asyncio.Transport | None = None
        try:
            made = await asyncio.get_running_loop().start_tls(
                transport, accepted, secure, server_side=True, ssl_handshake_timeout=self._limits.header_s
            )
        except OSError:  # also ssl.SSLError
            metrics.HANDSHAKES.inc()
        finally:
            if made is None or accepted.lost:
                transport.abort()
                self.shares.give(owner)
        if made is not None and not accepted.lost:
            self._serve(made, owner, accepted.early)

    def _serve(self, transport: asyncio.Transport, owner: str, early: bytes = b"") -> None:
        connection = Connection(self._server, self._limits, self._left, **self._options)
        self._owners[connection] = owner
        transport.set_protocol(connection)
        connection.connection_made(transport)
        if early:
            connection.data_received(early)

    def _left(self, connection: Connection) -> None:
        self.shares.give(self._owners.pop(connection))

    def _refuse(self, transport: asyncio.Transport) -> None:
        metrics.SHED.labels("connections").inc()
        if self._secure is not None:  # nobody would understand the answer
            transport.abort()
            return
        transport.write(_FULL)
        if self._refusing >= _REFUSING:
            transport.close()
            return
        self._refusing += 1
        transport.write_eof()
        asyncio.get_running_loop().call_later(_REFUSING_S, self._refused, transport)

    def _refused(self, transport: asyncio.Transport) -> None:
        self._refusing -= 1
        transport.abort()


class _Accepted(asyncio.Protocol):
    """The protocol of a new connection, and of its handshake. A refused connection keeps it; nobody reads its input."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self.securing = False
        #: What came with the end of the handshake.
        self.early = b""
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's.
        self._listener.admit(cast(asyncio.Transport, transport), self)

    def data_received(self, data: bytes) -> None:
        if self.securing:
            self.early += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True


def raised_file_limit() -> int:
    """Raise the limit of open files to the hard limit. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = hard if hard != resource.RLIM_INFINITY else 1 << 20
    if soft < most:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        except (ValueError, OSError):
            return soft
    return most
