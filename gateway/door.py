"""The listening socket. At most so many connections are let in; one more is told 503 and closed, before anything is kept for it.

A connection on which no request is completed for `gateway.idle_s` is closed by aiohttp, whether it never says anything, sends its headers a
byte at a time, or rests between two requests.
"""

from __future__ import annotations

import asyncio
import json
import resource

from aiohttp import web

from contracts.errors import Unavailable
from gateway import metrics

#: Files that are no connections of clients: streams to workers, schedulers, logs.
_OTHER_FILES = 256
_BODY = json.dumps(Unavailable("too many connections at the moment; try again", code="overloaded").envelope()).encode()
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json; charset=utf-8\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n" % len(_BODY)
) + _BODY


class _Full(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        metrics.SHED.labels("connections").inc()
        transport.write(_FULL)
        transport.close()


class Door:
    """Listens for one process."""

    def __init__(self, server: web.Server, max_connections: int) -> None:
        self._server = server
        self._limit = max(8, min(max_connections, raised_file_limit() - _OTHER_FILES))
        self._listening: asyncio.Server | None = None

    async def open(self, host: str, port: int, *, shared: bool) -> None:
        """Listen; shared: other processes listen there too. Raises OSError naming the address when the port is taken."""
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_server(self._answer, host, port, backlog=1024, reuse_port=shared or None)

    def _answer(self) -> asyncio.Protocol:
        protocol: asyncio.Protocol = _Full() if len(self._server.connections) >= self._limit else self._server()
        return protocol

    def close(self) -> None:
        """Let nobody in any more."""
        if self._listening is not None:
            self._listening.close()
            self._listening = None


def raised_file_limit() -> int:
    """Let this process open as many files as it may at all; how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = hard if hard != resource.RLIM_INFINITY else 1 << 20
    if soft < most:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        except (ValueError, OSError):
            return soft
    return most
