"""A request and its answer, byte by byte, over a real socket to a server that says what a test says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sidecar.exchange import AHEAD_BYTES, MOST_HEAD_BYTES, Broken, Exchange

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


class Server:
    """Says `pieces`, a write each, to whoever connects, and closes unless told to wait."""

    def __init__(self, *pieces: bytes, closes: bool = True) -> None:
        self.pieces, self.closes, self.heard, self.written = pieces, closes, b"", 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            self.heard = await reader.readuntil(b"\r\n\r\n")
            for piece in self.pieces:
                writer.write(piece)
                await writer.drain()
                self.written += len(piece)
                await asyncio.sleep(0)
            if not self.closes:
                await reader.read()
        writer.close()


@contextlib.asynccontextmanager
async def answered(folder: Path, server: Server) -> AsyncIterator[Exchange]:
    """An exchange with the server, whose answer's head is here."""
    listening = await asyncio.start_unix_server(server.serve, folder / "s")
    exchange = await Exchange.connect(folder / "s")
    try:
        async with asyncio.timeout(10):
            await exchange.begin("/v1/x", {"accept": "a/b"}, b"{}")
        yield exchange
    finally:
        exchange.close()
        listening.close()


async def whole(exchange: Exchange, body: bytearray | None = None) -> bytes:
    """All of the body, which is added to `body` as it comes."""
    body = bytearray() if body is None else body
    async with asyncio.timeout(10):
        while piece := await exchange.read():
            body += piece
    return bytes(body)


@pytest.mark.parametrize(
    ("said", "status", "body"),
    [
        (OK + b"Content-Length: 5\r\n\r\nhello", 200, b"hello"),
        (OK + b"Content-Length: 5\r\n\r\nhello and more", 200, b"hello"),
        (OK + b"content-length: 0\r\n\r\n", 200, b""),
        (OK + b"\r\nup to the end", 200, b"up to the end"),
        (b"HTTP/1.0 200\r\n\r\nold", 200, b"old"),
        (CHUNKED + b"5\r\nhello\r\n0\r\n\r\n", 200, b"hello"),
        (CHUNKED + b'1;a="b"\r\nx\r\n00A\r\n0123456789\r\n0\r\nT: railer\r\n\r\n', 200, b"x0123456789"),
        (CHUNKED + b"4\r\n\r\n\r\n\r\n0\r\n\r\n", 200, b"\r\n\r\n"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK + b"\r\nx", 200, b"x"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b""),
        (b"HTTP/1.1 503 \r\nContent-Length: 1\r\n\r\nx", 503, b"x"),
    ],
)
@pytest.mark.parametrize("step", [1, 2, 7, 1000])
async def test_answers_are_read_however_they_are_cut(
    tmp_path: Path, said: bytes, status: int, body: bytes, step: int
) -> None:
    server = Server(*(said[at : at + step] for at in range(0, len(said), step)))
    async with answered(tmp_path, server) as exchange:
        assert (exchange.status, await whole(exchange)) == (status, body)
        assert await exchange.read() == b"", "however often it is asked"
    assert server.heard.startswith(b"POST /v1/x HTTP/1.1\r\nhost: vllm\r\ncontent-length: 2\r\n")
    assert b"accept: a/b\r\n" in server.heard


async def test_headers_are_the_servers(tmp_path: Path) -> None:
    said = OK + b"Content-Type: Text/Event-Stream; charset=utf-8\r\nX-A:  b\t\r\nx-a: c\r\nX-E:\r\nX-L: \xe9\r\n\r\n"
    async with answered(tmp_path, Server(said)) as exchange:
        assert exchange.content_type == "text/event-stream"
        assert exchange.headers[1:] == [("x-a", "b"), ("x-a", "c"), ("x-e", ""), ("x-l", "\xe9")]


@pytest.mark.parametrize(
    "said",
    [
        b"", b"HTTP/1.1 200 OK\r\n", b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 20 OK\r\n\r\n", b"HTTP/2 200 OK\r\n\r\n",
        OK + b"no colon\r\n\r\n", OK + b"a b: c\r\n\r\n", OK + b" folded: x\r\n\r\n", OK + b"Content-Length: x\r\n\r\n",
        OK + b"Content-Length: -1\r\n\r\n", OK + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
        OK + b"Transfer-Encoding: gzip\r\n\r\n", OK + b"A: " + b"x" * MOST_HEAD_BYTES,
    ],
)  # fmt: skip
async def test_what_is_no_head_breaks_the_exchange(tmp_path: Path, said: bytes) -> None:
    with pytest.raises(Broken):
        async with answered(tmp_path, Server(said, closes=len(said) < 20)):
            pass


@pytest.mark.parametrize(
    ("said", "body"),
    [
        (OK + b"Content-Length: 9\r\n\r\nhell", b"hell"),
        (CHUNKED + b"5\r\nhell", b"hell"),
        (CHUNKED + b"5\r\nhello\r\n", b"hello"),
        (CHUNKED + b"5\r\nhello\r\n0\r\n", b"hello"),
        (CHUNKED + b"5\r\nhello!\r\n0\r\n\r\n", b"hello"),
        (CHUNKED + b"5\r\nhello\r\n-1\r\n", b"hello"),
        (CHUNKED + b"5\r\nhello\r\n0x1\r\n", b"hello"),
        (CHUNKED + b"5\r\nhello\r\n1_0\r\n", b"hello"),
        (CHUNKED + b"5\r\nhello\r\n" + b"f" * 13 + b"\r\n", b"hello"),
    ],
)
async def test_what_is_no_body_breaks_the_exchange_after_what_came(tmp_path: Path, said: bytes, body: bytes) -> None:
    async with answered(tmp_path, Server(said)) as exchange:
        got = bytearray()
        with pytest.raises(Broken):
            await whole(exchange, got)
        assert got == body


async def test_a_server_is_read_only_as_fast_as_its_answer_is_taken(tmp_path: Path) -> None:
    server = Server(OK + b"\r\n", *[b"x" * 65_536] * 500)
    async with answered(tmp_path, server) as exchange:
        await asyncio.sleep(0.3)
        assert server.written < 4 << 20 and exchange._waiting_bytes < AHEAD_BYTES + (1 << 20)
        assert len(await whole(exchange)) == 500 * 65_536


async def test_closing_ends_the_connection(tmp_path: Path) -> None:
    server = Server(OK + b"Content-Length: 2\r\n\r\nx", closes=False)
    async with answered(tmp_path, server) as exchange:
        assert await exchange.read() == b"x"
        exchange.close()
        with pytest.raises(Broken):
            await exchange.read()


async def test_a_place_without_a_server_is_an_error(tmp_path: Path) -> None:
    for place in (tmp_path / "none", "http://127.0.0.1:1"):
        with pytest.raises(OSError):  # noqa: PT011 - whichever
            await Exchange.connect(place)
