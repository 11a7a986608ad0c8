"""A proxy before a real S3 server that answers as a faulty one does. It understands HTTP/1.1 as far as object stores
speak it.

Each request is of one class (`reads`: GET and HEAD of an object, `lists`: GET of a listing, `writes`: PUT, POST and
DELETE), and each class has a fault, or none. A connection that is being served keeps the fault that was set when its
request came.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from types import TracebackType

from loadtest.stack import free_ports

CLASSES = ("reads", "lists", "writes")
#: 503; never an answer; a body that ends half-way; a length that is half or twice the body's; a kilobyte now and then;
#: the connection is reset; nobody listens; the request is carried out and its answer lost; another, older store
#: answers.
FAULTS = ("503", "hang", "truncate", "short", "long", "trickle", "reset", "refuse", "lost answer", "stale")
_HOP = ("connection", "transfer-encoding", "content-length")
_TRICKLE_S = 0.5


class S3Proxy:
    """Use as a context manager. `upstream`: the server's port. `stale`: port of a server that answers for the fault
    "stale"."""

    def __init__(self, upstream: int, stale: int = 0) -> None:
        self.upstream = upstream
        self.stale = stale
        self.port = free_ports(1)
        self.seen: Counter[tuple[str, str]] = Counter()  #: (class, fault) -> requests
        self._faults = dict.fromkeys(CLASSES, "")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="s3-proxy", daemon=True)
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()

    def __enter__(self) -> S3Proxy:
        self._thread.start()
        self._do(self._listen())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def set(self, fault: str, *classes: str) -> None:
        """From now on these classes (all, when none is named) have this fault. "refuse" is of all."""
        for name in classes or CLASSES:
            assert name in CLASSES and fault in FAULTS
            self._faults[name] = fault
        if fault == "refuse":
            self._do(self._close())

    def heal(self) -> None:
        """Everything is well again; requests that hang are cut."""
        self._faults = dict.fromkeys(CLASSES, "")
        self._do(self._heal())

    def faults_met(self) -> int:
        """Requests that met a fault."""
        return sum(number for (_, fault), number in self.seen.items() if fault)

    # ---- on the thread

    def _do(self, work) -> None:  # type: ignore[no-untyped-def]
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in list(self._serving):
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _heal(self) -> None:
        await self._close()
        await self._listen()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, ValueError):
                while await self._one(reader, writer):
                    pass
        except asyncio.CancelledError:
            pass
        finally:
            self._serving.discard(task)
            writer.transport.abort()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its answer; false when the connection is of no more use."""
        head, body = await _message(reader)
        method, target = head.split(b" ", 2)[:2]
        what = (
            "writes"
            if method not in (b"GET", b"HEAD")
            else "lists"
            if b"list-type=" in target or b"prefix=" in target
            else "reads"
        )
        fault = self._faults[what]
        self.seen[what, fault] += 1
        if fault == "reset":
            return False
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault == "503":
            text = (
                b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your request "
                b"rate.</Message></Error>"
            )
            writer.write(
                b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nContent-Length: %d\r\n\r\n" % len(text)
            )
            writer.write(b"" if method == b"HEAD" else text)
            await writer.drain()
            return True
        answer_head, answer = await self._ask(
            self.stale if fault == "stale" else self.upstream, head, body, method == b"HEAD"
        )
        if fault == "lost answer":
            return False
        return await _send(writer, answer_head, answer, fault, method == b"HEAD")

    async def _ask(self, port: int, head: bytes, body: bytes, without_body: bool) -> tuple[bytes, bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            lines = [line for line in head.split(b"\r\n") if not line.lower().startswith((b"connection:", b"expect:"))]
            if body and not any(line.lower().startswith(b"content-length:") for line in lines):
                lines.append(b"Content-Length: %d" % len(body))
            writer.write(b"\r\n".join([*lines, b"Connection: close", b"", b""]) + body)
            await writer.drain()
            return await _message(reader, without_body, answer=True)
        finally:
            writer.transport.abort()


async def _send(writer: asyncio.StreamWriter, head: bytes, body: bytes, fault: str, without_body: bool) -> bool:
    """The answer, harmed as the fault says; false when the connection ends with it."""
    lines = head.split(b"\r\n")
    kept = [line for line in lines if line.partition(b":")[0].strip().lower().decode() not in _HOP]
    length, said = len(body), _length(head) if without_body else len(body)
    if fault == "short" and not without_body:
        body = body[: length // 2]
        said = len(body)
    elif fault == "long" and not without_body:
        said = length * 2 + 1
    elif fault == "truncate":
        body = body[: length // 2]
    writer.write(b"\r\n".join([*kept, b"Content-Length: %d" % said, b"", b""]))
    if fault == "trickle":
        for start in range(0, len(body), 1024):
            writer.write(body[start : start + 1024])
            await writer.drain()
            await asyncio.sleep(_TRICKLE_S)
    else:
        writer.write(body)
    await writer.drain()
    if fault in ("truncate", "long"):
        await asyncio.sleep(0.05)
        return False
    return True


async def _message(
    reader: asyncio.StreamReader, without_body: bool = False, answer: bool = False
) -> tuple[bytes, bytes]:
    """(request or status line and headers, body)"""
    head = (await reader.readuntil(b"\r\n\r\n"))[:-4]
    while answer and head.startswith(b"HTTP/1.1 1"):
        head = (await reader.readuntil(b"\r\n\r\n"))[:-4]
    lower = head.lower()
    if without_body or (answer and head.split(b" ", 2)[1] in (b"204", b"304")):
        return head, b""
    if b"\r\ntransfer-encoding: chunked" in lower:
        return head, b"".join([part async for part in _chunks(reader)])
    length = _length(head)
    if length < 0:
        return head, await reader.read() if answer else b""
    return head, await reader.readexactly(length)


async def _chunks(reader: asyncio.StreamReader):  # type: ignore[no-untyped-def]
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:-2]
    while (await reader.readuntil(b"\r\n")) != b"\r\n":
        pass


def _length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            return int(value)
    return -1


@contextlib.contextmanager
def proxied(upstream: int, stale: int = 0) -> Iterator[S3Proxy]:
    """A proxy that is well."""
    with S3Proxy(upstream, stale) as proxy:
        yield proxy
