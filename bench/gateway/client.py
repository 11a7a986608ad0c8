"""A cheap HTTP client: requests are bytes; of answers it parses only where they begin and end."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_END = b"0\r\n\r\n"


@dataclass(slots=True)
class Answer:
    """An answer, with the seconds from sending to the first byte of its body (or first event) and to its end."""

    first_s: float
    total_s: float
    status: int
    events: int
    begins: bytes


class Connection(asyncio.Protocol):
    """A connection with one request at a time. tokens: events seen in all answers."""

    def __init__(self) -> None:
        self.events = 0
        self._answer: asyncio.Future[Answer] | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError("closed in the middle of an answer"))

    def send(self, request: bytes) -> asyncio.Future[Answer]:
        self._answer = asyncio.get_running_loop().create_future()
        self._head, self._left, self._first_s, self._seen, self._status = bytearray(), None, 0.0, 0, 0
        self._began = time.perf_counter()
        self.transport.write(request)
        return self._answer

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():
            return
        if not self._status:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            head, data = bytes(self._head[:end]).lower(), bytes(self._head[end + 4 :])
            self._status = int(head[9:12])
            at = head.find(b"content-length:")
            self._left = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else None
            self._tail, self._begins = b"", data[:300]
        found = data.count(b"data: ")
        self._seen += found
        self.events += found
        if not self._first_s and data and (self._left is not None or found):
            self._first_s = time.perf_counter() - self._began
        if self._left is not None:
            self._left -= len(data)
            if self._left > 0:
                return
        else:
            self._tail = (self._tail + data[-len(_END) :])[-len(_END) :]
            if self._tail != _END:
                return
        total_s = time.perf_counter() - self._began
        self._answer.set_result(Answer(self._first_s or total_s, total_s, self._status, self._seen, self._begins))


async def connect(port: int) -> Connection:
    _, protocol = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", port)
    return protocol


def post(path: str, body: Any, **headers: str) -> bytes:
    """A POST request as bytes."""
    text = json.dumps(body).encode()
    named = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n{named}Content-Length: "
        f"{len(text)}\r\n\r\n"
    ).encode() + text


async def in_turn(connection: Connection, requests: Sequence[bytes]) -> list[Answer]:
    """Send requests one after another. Raises RuntimeError for a failed answer."""
    return [checked(await connection.send(request)) for request in requests]


async def as_fast_as_answered(port: int, at_once: int, seconds: float, request: Callable[[int], bytes]) -> float:
    """Answers per second of `connections` connections in a closed loop. `request` gets a unique number each time."""
    connections = [await connect(port) for _ in range(at_once)]
    end, done = time.perf_counter() + seconds, 0

    async def caller(connection: Connection) -> None:
        nonlocal done
        while time.perf_counter() < end:
            done += 1
            checked(await connection.send(request(done)))

    began = time.perf_counter()
    await asyncio.gather(*(caller(c) for c in connections))
    took = time.perf_counter() - began
    for connection in connections:
        connection.transport.close()
    return done / took


def checked(answer: Answer) -> Answer:
    if answer.status not in (200, 202):
        raise RuntimeError(f"an answer of status {answer.status}: {answer.begins!r}")
    return answer
