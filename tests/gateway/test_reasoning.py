"""What a model thinks comes in `reasoning_content`, whole and streamed, unless it is not wanted; and what it says is
what counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from gateway_fakes import MODEL, Stack, events, stack

TALK = [{"role": "user", "content": "hi"}]
SAYS = ["<think>", "\n", "A ", "cat", ".", "\n", "</think>", "\n\n", "Hel", "lo."]


@pytest.fixture(scope="module")
async def s() -> AsyncIterator[Stack]:
    async with stack(1) as running:
        running.workers[0].says = SAYS
        yield running


async def chat(s: Stack, **more: Any) -> Any:
    async with s.http.post(f"{s.url}/v1/chat/completions", json={"model": MODEL, "messages": TALK} | more) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def streamed(s: Stack, **more: Any) -> list[Any]:
    body = {"model": MODEL, "messages": TALK, "stream": True, "stream_options": {"include_usage": True}} | more
    async with s.http.post(f"{s.url}/v1/chat/completions", json=body) as answer:
        return [event for event in await events(answer) if event != "[DONE]"]


def joined(chunks: list[Any], name: str) -> str:
    return "".join(c["choices"][0]["delta"].get(name) or "" for c in chunks if c["choices"])


async def test_a_thought_has_a_field_of_its_own(s: Stack) -> None:
    answer = await chat(s)
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Hello.", "A cat.")
    assert answer["usage"]["completion_tokens"] == len(SAYS)
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 8, "all but what is said"


async def test_a_stream_tells_it_piece_by_piece_and_first(s: Stack) -> None:
    s.workers[0].token_s = 0.01
    try:
        chunks = await streamed(s)
    finally:
        s.workers[0].token_s = 0.0
    assert (joined(chunks, "content"), joined(chunks, "reasoning_content")) == ("Hello.", "A cat.")
    kinds = [next(iter(c["choices"][0]["delta"]), "") for c in chunks[1:-1]]
    assert kinds.count("reasoning_content") > 1 and kinds == sorted(
        kinds, key=["reasoning_content", "content", ""].index
    )
    assert chunks[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] == 8


async def test_separate_reasoning_false_leaves_a_thought_where_it_was_said(s: Stack) -> None:
    message = (await chat(s, separate_reasoning=False))["choices"][0]["message"]
    assert message["content"] == "".join(SAYS) and "reasoning_content" not in message
    assert joined(await streamed(s, separate_reasoning=False), "content") == "".join(SAYS)


@pytest.mark.parametrize("more", [{"include_reasoning": False}, {"reasoning": {"exclude": True}}])
async def test_it_is_left_out_where_it_is_not_wanted(s: Stack, more: Any) -> None:
    message = (await chat(s, **more))["choices"][0]["message"]
    assert message["content"] == "Hello." and "reasoning_content" not in message
    chunks = await streamed(s, **more)
    assert (joined(chunks, "content"), joined(chunks, "reasoning_content")) == ("Hello.", "")


async def test_a_form_leaves_no_room_for_a_thought_and_nothing_is_taken_from_it(s: Stack) -> None:
    assert (await chat(s, guided_regex="(.|\\n)*"))["choices"][0]["message"]["content"] == "".join(SAYS)


async def test_completions_are_text_as_it_comes(s: Stack) -> None:
    async with s.http.post(f"{s.url}/v1/completions", json={"model": MODEL, "prompt": "a"}) as answer:
        assert (await answer.json())["choices"][0]["text"] == "".join(SAYS)


async def test_logprobs_are_told_of_every_token(s: Stack) -> None:
    told = (await chat(s, logprobs=True))["choices"][0]["logprobs"]["content"]
    assert [token["token"] for token in told] == SAYS
    chunks = await streamed(s, logprobs=True)
    assert [
        t["token"]
        for c in chunks
        if c["choices"] and c["choices"][0]["logprobs"]
        for t in c["choices"][0]["logprobs"]["content"]
    ] == SAYS


async def test_a_prompt_that_ends_within_a_thought_and_an_answer_that_never_leaves_it() -> None:
    async with stack(1) as s:
        s.workers[0].thinking = True
        s.workers[0].says = SAYS[2:]
        message = (await chat(s))["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == ("Hello.", "A cat.")
        s.workers[0].says = ["A ", "cat"]
        message = (await chat(s))["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == ("", "A cat")


async def test_a_conversation_goes_on_from_what_was_said(s: Stack) -> None:
    async with s.http.post(f"{s.url}/v1/chat/completions", json={"model": MODEL, "messages": TALK}) as answer:
        first, said = answer.headers["X-Session-Id"], (await answer.json())["choices"][0]["message"]
    talk = [*TALK, {"role": "assistant", **said}, {"role": "user", "content": "and?"}]
    talk[1] = {k: v for k, v in talk[1].items() if k in ("role", "content", "reasoning_content")}
    async with s.http.post(f"{s.url}/v1/chat/completions", json={"model": MODEL, "messages": talk}) as answer:
        assert answer.status == 200 and answer.headers["X-Session-Id"] == first


async def test_an_answer_that_moves_to_another_worker_is_taken_apart_as_one() -> None:
    async with stack(2) as s:
        for worker in s.workers:
            worker.says = SAYS
        s.workers[0].die_after = 4
        message = (await asyncio.wait_for(chat(s), 20))["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == ("Hello.", "A cat.")
        assert s.workers[1].submitted
