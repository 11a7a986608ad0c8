"""Callers who take their time: thousands of connections that never finish what they say, and what a clock can learn
from hints."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import resource
import statistics
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from security_harness import CHAT, KEY_A, SESSION, Harness, harness, read_answer

from tests.signed_rank import standing_out

MIB = 1 << 20
MANY = 2_000
JSON = "Host: x\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module", autouse=True)
def files() -> None:
    """This process needs as many files as it opens connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MANY + 1000
    if soft < wanted:
        if hard != resource.RLIM_INFINITY and hard < wanted:
            pytest.skip(f"this account may open only {hard} files")
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextlib.asynccontextmanager
async def crowd(
    h: Harness, says: bytes, count: int = MANY
) -> AsyncIterator[list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]:
    """So many connections that have said this much."""
    found: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    try:
        while len(found) < count:
            wanted = min(100, count - len(found))
            made = await asyncio.gather(*(asyncio.open_connection("127.0.0.1", h.port) for _ in range(wanted)))
            for _, writer in made:
                writer.write(says)
            found += made
        yield found
    finally:
        for _, writer in found:
            writer.close()


async def closed(reader: asyncio.StreamReader) -> bool:
    """The other end has closed; whatever it said before is read."""
    with contextlib.suppress(ConnectionError):
        while await reader.read(65_536):
            pass
    return True


@contextlib.asynccontextmanager
async def trickle(writers: list[asyncio.StreamWriter], piece: bytes) -> AsyncIterator[None]:
    """A little more on each, now and then, meanwhile."""

    async def drip() -> None:
        while True:
            for writer in writers:
                with contextlib.suppress(ConnectionError):
                    writer.write(piece)
            await asyncio.sleep(0.5)

    dripping = asyncio.create_task(drip())
    try:
        yield
    finally:
        dripping.cancel()


@pytest.mark.slow
async def test_two_thousand_connections_that_never_finish_their_headers_harm_nobody_and_end(tmp_path: Path) -> None:
    async with harness(tmp_path, idle_s=8) as h:
        before = h.rss_bytes
        async with (
            crowd(h, b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-A: ") as found,
            trickle([w for _, w in found], b"a"),
        ):
            for _ in range(20):
                assert (await h.ask("POST", "/v1/chat/completions", CHAT)).status == 200
                assert (await h.ask("POST", "/v1/advisory", {"session_id": SESSION})).status == 202
            assert (h.rss_bytes - before) / MANY < 64 << 10, "bytes a connection"
            async with asyncio.timeout(60):
                await asyncio.gather(*(closed(reader) for reader, _ in found))
        await h.is_whole()


@pytest.mark.slow
async def test_two_thousand_bodies_that_never_come_harm_nobody(tmp_path: Path) -> None:
    async with harness(tmp_path, idle_s=8) as h:
        before = h.rss_bytes
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\n{JSON}Authorization: Bearer {KEY_A}\r\nContent-Length: "
            f"{16 * MIB}\r\n\r\n{{"
        )
        async with crowd(h, head.encode()) as found, trickle([w for _, w in found], b" " * 100):
            for _ in range(20):
                assert (await h.ask("POST", "/v1/chat/completions", CHAT)).status == 200
            assert (h.rss_bytes - before) / MANY < 128 << 10, "bytes a connection"
        await h.is_whole()


@pytest.mark.slow
async def test_two_thousand_connections_without_a_key_cannot_hold_bodies(tmp_path: Path) -> None:
    """What unauthenticated callers send to a route that reads the body first is bounded, and their other
    bodies are not read."""
    async with harness(tmp_path, body_memory_bytes=64 * MIB) as h:
        before = h.rss_bytes
        refused = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {16 * MIB}\r\n\r\n".encode()
            + b" " * 4096
        )
        async with crowd(h, refused, 200) as found:
            assert {(await read_answer(reader)).status for reader, _ in found} == {401}
        hints = f"POST /v1/advisory HTTP/1.1\r\nHost: x\r\nContent-Length: {MIB - 1}\r\n\r\n".encode() + b" " * (
            MIB // 2
        )
        async with crowd(h, hints, 300) as found:
            assert {(await read_answer(reader)).status for reader, _ in found} == {413}, (
                "without a key in a header, less is read"
            )
        held = f"POST /v1/advisory HTTP/1.1\r\nHost: x\r\nContent-Length: {64 << 10}\r\n\r\n".encode() + b" " * (
            60 << 10
        )
        async with crowd(h, held):
            for _ in range(5):
                large = CHAT | {"user": "u" * (15 * MIB)}
                assert (await h.ask("POST", "/v1/chat/completions", large)).status == 200, "callers have their own"
                assert (await h.ask("POST", "/v1/advisory", {"session_id": SESSION})).status == 202
            assert h.rss_bytes - before < 400 * MIB
        await h.is_whole()


async def test_headers_that_never_end_are_given_up(tmp_path: Path) -> None:
    async with harness(tmp_path, idle_s=1) as h:
        async with (
            crowd(h, b"GET /health HTTP/1.1\r\nX-A: ", 20) as some,
            crowd(h, b"", 20) as others,
            asyncio.timeout(30),
        ):
            await asyncio.gather(*(closed(reader) for reader, _ in (*some, *others)))
        await h.is_whole()


# ---- clocks --------------------------------------------------------------------------------------------------------
def test_the_statistic_finds_a_difference_where_there_is_one_and_none_where_there_is_none() -> None:
    rng = random.Random(5)
    noise = [rng.gauss(0, 1) + (rng.random() < 0.02) * rng.gauss(0, 50) for _ in range(2000)]
    assert abs(standing_out(noise)) < 4
    assert abs(standing_out([d + 0.25 for d in noise])) > 6


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/advisory", "/v1/invalidate"])
async def test_no_clock_tells_whether_a_session_exists(tmp_path: Path, path: str) -> None:
    """Interleaved pairs, each in random order, over one connection; a signed-rank test with a generous threshold. Were
    the two told apart by a tenth of the time's spread, it would fail."""
    async with harness(tmp_path, max_advisories_per_s=100_000) as h:
        headers = {"Authorization": f"Bearer {KEY_A}", "Content-Type": "application/json"}
        url, rng = f"http://127.0.0.1:{h.port}{path}", random.Random(11)
        async with aiohttp.ClientSession(headers=headers) as http:
            # It exists in every place that could remember it: it was answered, hinted, and the fleet says so.
            body = json.dumps(CHAT | {"session_id": SESSION})
            async with http.post(f"http://127.0.0.1:{h.port}/v1/chat/completions", data=body) as r:
                assert r.status == 200

            async def timed(session: str) -> float:
                content = json.dumps({"session_id": session})
                began = time.perf_counter()
                async with http.post(url, data=content) as r:
                    await r.read()
                took = time.perf_counter() - began
                assert r.status == 202
                return took

            differences = []
            for i in range(3000):
                # As long as the other's, and every time another one, as somebody who guesses would ask.
                absent = f"none-{i % 10}"[:6]
                pair = [("there", SESSION), ("absent", absent)]
                rng.shuffle(pair)
                took = {what: await timed(session) for what, session in pair}
                if i >= 200:  # the first ones warm up
                    differences.append(took["there"] - took["absent"])
        away = standing_out(differences)
        assert abs(away) < 5, (
            f"{away:.1f} standard deviations; the median of the differences is "
            f"{statistics.median(differences) * 1e6:.1f} µs"
        )
