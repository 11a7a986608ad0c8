"""A stream that is silent for long gets comments, which official clients ignore; nothing else changes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from gateway_fakes import MODEL, Stack, stack, until

from contracts.v1 import scheduler_pb2 as pb
from gateway.sse import comment

ASKED: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def s() -> AsyncIterator[Stack]:
    async with stack(comment_s=0.05) as running:
        yield running


async def text_of(s: Stack, **more: Any) -> str:
    body = {"model": MODEL, "messages": ASKED, **more}
    async with s.http.post(f"{s.url}/v1/chat/completions", json=body) as r:
        assert r.status == 200
        return await r.text()


def comments(text: str) -> list[str]:
    return re.findall("^: (.*)$", text, re.MULTILINE)


def commenting() -> list[str]:
    """Tasks that send comments."""
    return [name for task in asyncio.all_tasks() if "kept_alive" in (name := repr(task.get_coro()))]


async def test_a_silent_stream_says_that_it_waits_between_whole_events(s: Stack) -> None:
    assert not comments(await text_of(s, stream=True))
    for worker in s.workers:
        worker.token_s = 0.2
    text = await text_of(s, stream=True)
    assert len(comments(text)) >= 5 and set(comments(text)) == {"waiting"}
    events = [each for each in text.split("\n\n") if each and not each.startswith(":")]
    assert all(re.fullmatch(r"data: (\{.*\}|\[DONE\])", each) for each in events) and events[-1] == "data: [DONE]"


async def test_a_whole_answer_has_none(s: Stack) -> None:
    for worker in s.workers:
        worker.token_s = 0.1
    assert not comments(await text_of(s))


async def test_the_official_client_hears_the_same_with_comments(s: Stack) -> None:
    async def say() -> list[str]:
        client = openai.AsyncOpenAI(base_url=f"{s.url}/v1", api_key="none", max_retries=0)
        chunks = await client.chat.completions.create(model=MODEL, messages=ASKED, temperature=0, stream=True)
        return [choice.delta.content or "" async for chunk in chunks for choice in chunk.choices]

    quick = await say()
    for worker in s.workers:
        worker.token_s = 0.2
    assert await say() == quick and "".join(quick)


async def test_it_names_the_model_whose_weights_come() -> None:
    loading = pb.ModelInfo(name=MODEL, max_tokens=2000, created_s=1, state=pb.MODEL_STATE_LOADING)
    async with stack(comment_s=0.05, model=loading) as s:
        for worker in s.workers:
            worker.token_s = 0.2
        assert set(comments(await text_of(s, stream=True))) == {f"activating {MODEL}"}


async def test_a_reader_that_goes_away_ends_its_request_and_its_comments(s: Stack) -> None:
    for worker in s.workers:
        worker.token_s = 5.0
    body = {"model": MODEL, "messages": ASKED, "stream": True}
    async with s.http.post(f"{s.url}/v1/chat/completions", json=body) as r:
        while not (await r.content.readline()).startswith(b":"):
            pass
        assert commenting()
        r.close()
    await until(lambda: any(worker.cancelled for worker in s.workers))
    await until(lambda: not commenting())


def test_a_comment_is_one_line_whatever_its_text() -> None:
    assert comment("a\ndata: b\r\n\x85c") == b": a?data: b???c\n\n"
