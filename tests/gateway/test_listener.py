"""The listener of a gateway process under uvloop: clients that do not read, connections that send nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from gateway_fakes import until
from security_harness import CHAT, KEY_A, KEY_B, Harness, harness, read_answer

#: More than kernels and buffers hold between two processes.
LONG = CHAT | {"stream": True, "max_tokens": 1_000_000}


async def connect(h: Harness, source: str = "127.0.0.1") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", h.port, local_addr=(source, 0))


def head(h: Harness, body: bytes, path: str = "/v1/chat/completions", key: str = KEY_A) -> bytes:
    said = (
        f"Host: 127.0.0.1:{h.port}\r\nAuthorization: Bearer {key}\r\nContent-Type: "
        f"application/json\r\nContent-Length: {len(body)}\r\n"
    )
    return f"POST {path} HTTP/1.1\r\n{said}\r\n".encode()


@contextlib.asynccontextmanager
async def deaf(h: Harness, body: object, key: str = KEY_A, room_bytes: int = 4096) -> AsyncIterator[socket.socket]:
    """A client with little room that asks and does not read."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room_bytes)
        s.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(s, ("127.0.0.1", h.port))
        content = json.dumps(body).encode()
        await loop.sock_sendall(s, head(h, content, key=key) + content)
        yield s


async def metric(h: Harness, name: str) -> float:
    text = (await h.ask("GET", "/metrics", key=None)).body.decode()
    found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


async def is_free(h: Harness) -> bool:
    fleet = await h.ask("GET", "/v1/fleet", key=KEY_B)
    return bool(json.loads(fleet.body)["active_requests"] == 0)


# ---- clients that do not read --------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
async def brisk(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Harness]:
    """A gateway that waits a second for a client to read."""
    async with harness(tmp_path_factory.mktemp("brisk"), write_s=1, max_requests=4) as running:
        running.worker.token_s = 1e-5
        yield running


async def test_a_client_that_never_reads_its_stream_is_cut_off_and_its_slot_and_its_workers_request_are_free(
    brisk: Harness,
) -> None:
    brisk.worker.cancelled.clear()
    async with deaf(brisk, LONG):
        await until(lambda: bool(brisk.worker.cancelled), 20)
        await until(lambda: is_free(brisk), 5)
    assert await metric(brisk, 'upbeat_gateway_cut_total{why="write"}') >= 1
    await brisk.is_whole()


async def test_a_client_that_reads_a_byte_a_second_is_cut_off_too(brisk: Harness) -> None:
    brisk.worker.cancelled.clear()
    async with deaf(brisk, LONG) as s:
        loop = asyncio.get_running_loop()

        async def sip() -> None:
            with contextlib.suppress(ConnectionError):
                for _ in range(60):
                    await loop.sock_recv(s, 1)
                    await asyncio.sleep(1)

        sipping = asyncio.create_task(sip())
        try:
            await until(lambda: bool(brisk.worker.cancelled), 20)
            await until(lambda: is_free(brisk), 5)
        finally:
            sipping.cancel()
            await asyncio.gather(sipping, return_exceptions=True)


async def test_an_answer_in_one_body_that_nobody_reads_frees_its_slot_too(brisk: Harness) -> None:
    async with deaf(brisk, CHAT | {"max_tokens": 20_000, "logprobs": True, "top_logprobs": 2}):
        before = await metric(brisk, 'upbeat_gateway_cut_total{why="write"}')

        async def is_cut() -> bool:
            return await metric(brisk, 'upbeat_gateway_cut_total{why="write"}') > before

        await until(is_cut, 30)
        await until(lambda: is_free(brisk), 5)


async def test_a_client_that_reads_slowly_reads_to_the_end(brisk: Harness) -> None:
    """Slower than the stream, for several times the deadline."""
    async with deaf(brisk, CHAT | {"stream": True, "max_tokens": 8_000}, room_bytes=1 << 16) as s:
        loop, found = asyncio.get_running_loop(), bytearray()
        while not found.endswith(b"0\r\n\r\n"):
            piece = await loop.sock_recv(s, 1 << 16)
            assert piece, "cut off"
            found += piece
            await asyncio.sleep(len(piece) / 400_000)
    assert found.count(b"data: ") == 8_000 + 3 and b"data: [DONE]" in found


# ---- connections that say nothing ----------------------------------------------------------------------------------
async def test_a_full_listener_answers_503_as_documented(tmp_path: Path) -> None:
    """Under uvloop, whose transports are its own; the harness looks for tracebacks in the log."""
    async with harness(tmp_path, max_connections=8, tenant_share=1) as h:
        silent = [await connect(h) for _ in range(8)]
        for content in (b"", b"x" * (1 << 20)):
            reader, writer = await connect(h)
            with contextlib.suppress(ConnectionError):
                writer.write(head(h, content) + content if content else b"")
                await writer.drain()
            answer = await read_answer(reader)
            assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (503, "overloaded", "1")
            assert answer.headers["connection"] == "close"
            writer.close()
        silent.pop()[1].close()

        async def is_served() -> bool:
            return (await h.ask("GET", "/health", key=None)).status == 200

        await until(is_served, 5)
        for _, writer in silent:
            writer.close()
        await until(is_served, 5)
        assert await metric(h, 'upbeat_gateway_shed_total{what="connections"}') >= 2


async def test_a_listener_survives_bursts_of_connections(tmp_path: Path) -> None:
    async with harness(tmp_path, max_connections=8, tenant_share=1) as h:
        for _ in range(3):
            many = await asyncio.gather(*(connect(h) for _ in range(200)))
            found = await asyncio.gather(
                *(asyncio.wait_for(reader.read(12), 3) for reader, _ in many[-50:]), return_exceptions=True
            )
            assert b"HTTP/1.1 503" in found
            for _, writer in many:
                writer.close()
        await until(lambda: served(h, "127.0.0.1"), 10)


async def served(h: Harness, source: str) -> bool:
    reader, writer = await connect(h, source)
    writer.write(f"GET /health HTTP/1.1\r\nHost: 127.0.0.1:{h.port}\r\nConnection: close\r\n\r\n".encode())
    answer = await read_answer(reader)
    writer.close()
    return answer.status == 200


async def test_one_address_cannot_take_all_connections(tmp_path: Path) -> None:
    async with harness(tmp_path, max_connections=20) as h:
        silent = [await connect(h, "127.0.0.2") for _ in range(10)]
        assert not await served(h, "127.0.0.2"), "it has its half"
        assert all([await served(h, source) for source in ("127.0.0.1", "127.0.0.3", "127.0.0.4")])
        silent.pop()[1].close()
        await until(lambda: served(h, "127.0.0.2"), 5)
        for _, writer in silent:
            writer.close()


async def test_headers_that_do_not_come_are_not_awaited_for_long_and_a_rest_between_requests_is_none(
    tmp_path: Path,
) -> None:
    async with harness(tmp_path, header_s=1) as h:
        ask = f"GET /health HTTP/1.1\r\nHost: 127.0.0.1:{h.port}\r\n\r\n".encode()
        silent, _ = await connect(h)
        dripping, drip = await connect(h)
        second, again = await connect(h)
        resting, rest = await connect(h)
        drip.write(b"GET /health HTTP/1.1\r\nX-A: ")
        for reader, writer in ((second, again), (resting, rest)):
            writer.write(ask)
            assert (await read_answer(reader)).status == 200
        again.write(ask[:20])
        async with asyncio.timeout(5):
            for i in range(3):
                drip.write(b"a" * i)
                await asyncio.sleep(0.3)
            for reader in (silent, dripping, second):
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
        rest.write(ask)
        assert (await read_answer(resting)).status == 200
        rest.close()
        assert await metric(h, 'upbeat_gateway_cut_total{why="headers"}') == 3


async def test_a_body_that_takes_its_time_is_no_late_header(tmp_path: Path) -> None:
    async with harness(tmp_path, header_s=1) as h:
        reader, writer = await connect(h)
        content = json.dumps(CHAT).encode()
        writer.write(head(h, content))
        for at in range(0, len(content), 20):
            writer.write(content[at : at + 20])
            await asyncio.sleep(0.7)
        assert (await read_answer(reader)).status == 200
        writer.close()
