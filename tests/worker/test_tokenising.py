"""Whose prompt is read next: small ones never wait for large ones, and no tenant has all threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import pytest

from contracts.errors import InvalidRequest, Unavailable
from contracts.request import GenerateRequest, Sampling, ToolUse
from worker.text import tokenising
from worker.text.tokenising import SMALL, Tokenising, size


def request(tenant: str, prompt: str) -> GenerateRequest:
    return GenerateRequest("r", tenant, "s", "m", Sampling(), prompt=prompt)


async def run(pool: Tokenising, tenant: str, prompt: str, work: Callable[[], list[int]]) -> list[int]:
    return await pool.run(tenant, len(prompt), work)


@pytest.fixture
async def pool() -> AsyncIterator[Tokenising]:
    made = Tokenising()
    yield made
    made.stop()


async def test_a_tenants_large_prompts_delay_neither_small_ones_nor_another_tenants(pool: Tokenising) -> None:
    go, large = threading.Event(), "x" * (SMALL + 1)

    def slow() -> list[int]:
        assert go.wait(20)
        return [1]

    waiting = [asyncio.create_task(run(pool, "a", large, slow)) for _ in range(8)]
    await asyncio.sleep(0.05)
    try:
        async with asyncio.timeout(10):
            assert await run(pool, "a", "small", lambda: [2]) == [2]
            assert await run(pool, "b", large, lambda: [3]) == [3]
            assert await run(pool, "b", "small", lambda: [4]) == [4]
        assert not any(task.done() for task in waiting)
    finally:
        go.set()
    assert await asyncio.gather(*waiting) == [[1]] * 8


async def test_what_is_wrong_with_a_prompt_is_raised_and_the_next_one_is_read(pool: Tokenising) -> None:
    def refuse() -> list[int]:
        raise InvalidRequest("no")

    with pytest.raises(InvalidRequest):
        await run(pool, "a", "x", refuse)
    assert await run(pool, "a", "x", lambda: [1]) == [1]


async def test_more_than_may_wait_is_refused(pool: Tokenising) -> None:
    go = threading.Event()

    def slow() -> list[int]:
        assert go.wait(20)
        return []

    waiting = [asyncio.create_task(run(pool, "a", "x", slow)) for _ in range(tokenising.WAITING + 1)]
    await asyncio.sleep(0.1)
    with pytest.raises(Unavailable):
        await run(pool, "a", "x", slow)
    assert await run(pool, "b", "x", lambda: [5]) == [5], "another tenant has its own queue"
    go.set()
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


def test_everything_that_is_read_counts() -> None:
    assert size(request("a", "ü" * 10)) == 20
    assert size(GenerateRequest("r", "t", "s", "m", Sampling(), prompt_tokens=[1, 2])) == 2
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "x" * 100}}
    messages = [{"role": "user", "content": "four"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    chat = GenerateRequest("r", "t", "s", "m", Sampling(), messages=messages, tool_use=ToolUse("[" + "x" * 50 + "]"))
    assert size(chat) > 150
    short = [{"role": "user", "content": "a"}] * 16_000
    assert size(GenerateRequest("r", "t", "s", "m", Sampling(), messages=short)) > SMALL, "a template runs for each"
