"""`POST /tokenize` and `POST /detokenize` at the gateway: what is passed on, what is refused and how it is named, and
who makes way."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import msgpack
import pytest
from gateway_fakes import MODEL, QUICK, Stack, stack, until
from hypothesis import given
from hypothesis import strategies as st
from toy_tokenizer import MAX_MODEL_LEN

from contracts.errors import Unavailable
from contracts.token_lists import MOST_TOKENS
from contracts.v1 import scheduler_pb2 as pb
from gateway.core.retry import RetryLimits
from gateway.openai import token_answers
from gateway.openai.token_answers import detokenized, tokenized

TALK = [{"role": "user", "content": "hi"}]
Sent = tuple[int, Any]


@pytest.fixture(scope="module")
async def s() -> AsyncIterator[Stack]:
    async with stack(2) as running:
        yield running


@contextlib.asynccontextmanager
async def serving(**model: int) -> AsyncIterator[Stack]:
    """A node whose model has these bounds."""
    async with stack(1, wait=False) as running:
        running.scheduler.model = pb.ModelInfo(name=MODEL, created_s=1_700_000_000, **model)
        running.scheduler.set_absent()
        await until(
            lambda: running.gateway.parts is not None and running.gateway.parts.fleet.models.get(MODEL) is not None
        )
        await until(lambda: running.gateway.parts.fleet.models[MODEL].max_tokens == model["max_tokens"])
        await running.ready()
        yield running


async def post(s: Stack, path: str, body: Any, **headers: str) -> Sent:
    async with s.http.post(s.url + path, json=body, headers=headers) as answer:
        return answer.status, await answer.json()


async def refused(s: Stack, path: str, body: Any) -> tuple[int, str | None, str]:
    status, answer = await post(s, path, body)
    return status, answer["error"]["param"], answer["error"]["code"]


async def test_a_prompt_and_back(s: Stack) -> None:
    text = 'é "quoted" \\ \n 💥 \x00'
    status, answer = await post(s, "/tokenize", {"model": MODEL, "prompt": text})
    assert status == 200
    assert answer == {
        "count": len(text),
        "max_model_len": MAX_MODEL_LEN,
        "tokens": [ord(c) for c in text],
        "token_strs": None,
    }
    assert await post(s, "/detokenize", {"model": MODEL, "tokens": answer["tokens"]}) == (200, {"prompt": text})


async def test_the_model_may_be_left_out_and_an_empty_text_has_no_tokens(s: Stack) -> None:
    status, answer = await post(s, "/tokenize", {"prompt": "", "return_token_strs": True})
    assert (status, answer["count"], answer["tokens"], answer["token_strs"]) == (200, 0, [], [])
    assert await post(s, "/detokenize", {"tokens": []}) == (200, {"prompt": ""})


async def test_the_worker_is_told_what_the_caller_says(s: Stack) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body = {
        "messages": [*TALK, {"role": "assistant", "content": "ye"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
        "add_special_tokens": True,
        "return_token_strs": True,
        "chat_template_kwargs": {"enable_thinking": False},
        "tools": [tool],
        "chat_template": None,
        "mm_processor_kwargs": {},
    }
    status, answer = await post(s, "/tokenize", body)
    assert status == 200 and answer["token_strs"] == list("<user>hi<assistant>ye")
    asked = [question for w in s.workers for question in w.asked][-1]
    assert msgpack.unpackb(asked.messages) == body["messages"] and json.loads(asked.tools) == [tool]
    assert (
        json.loads(asked.template_kwargs) == {"enable_thinking": False}
        and asked.tenant == "default"
        and not asked.prompt
    )
    assert (asked.add_generation_prompt, asked.continue_final_message, asked.add_special_tokens) == (False, True, True)


async def test_what_is_not_said_is_as_in_vllm(s: Stack) -> None:
    for worker in s.workers:
        worker.asked.clear()
    await post(s, "/tokenize", {"prompt": "a"})
    await post(s, "/tokenize", {"messages": TALK})
    plain, chat = sorted((q for w in s.workers for q in w.asked), key=lambda q: bool(q.messages))
    assert plain.add_special_tokens and not plain.return_token_strs
    assert chat.add_generation_prompt and not chat.add_special_tokens and not chat.continue_final_message


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("/tokenize", {}, "prompt", "missing_required_parameter"),
        ("/tokenize", [], None, "invalid_value"),
        ("/tokenize", {"prompt": "a", "messages": TALK}, "prompt", "invalid_value"),
        ("/tokenize", {"prompt": ["a"]}, "prompt", "invalid_type"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt", "invalid_value"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens", "invalid_type"),
        ("/tokenize", {"prompt": "a", "temperature": 1}, "temperature", "unknown_parameter"),
        ("/tokenize", {"prompt": "a", "user": "me"}, "user", "unknown_parameter"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt", "unknown_parameter"),
        ("/tokenize", {"prompt": "a", "chat_template": "{{ 1 }}"}, "chat_template", "unsupported_parameter"),
        ("/tokenize", {"messages": []}, "messages", "invalid_value"),
        ("/tokenize", {"messages": [{"role": "nobody", "content": "a"}]}, "messages[0].role", "invalid_value"),
        ("/tokenize", {"messages": TALK, "continue_final_message": True}, "continue_final_message", "invalid_value"),
        (
            "/tokenize",
            {"messages": TALK, "chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs.messages",
            "invalid_value",
        ),
        ("/tokenize", {"messages": TALK, "tools": [{"type": "x"}]}, "tools[0].type", "unsupported_parameter"),
        (
            "/tokenize",
            {"messages": TALK, "tools": [{"type": "function", "function": {"name": "f"}}] * 2},
            "tools",
            "invalid_value",
        ),
        ("/detokenize", {}, "tokens", "missing_required_parameter"),
        ("/detokenize", {"tokens": "1"}, "tokens", "invalid_type"),
        ("/detokenize", {"tokens": [1, True]}, "tokens[1]", "invalid_type"),
        ("/detokenize", {"tokens": [1.0]}, "tokens[0]", "invalid_type"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]", "invalid_type"),
        ("/detokenize", {"tokens": [1 << 31]}, "tokens[0]", "invalid_type"),
        ("/detokenize", {"tokens": [1], "skip_special_tokens": True}, "skip_special_tokens", "unknown_parameter"),
    ],
)
async def test_what_is_wrong_is_named(s: Stack, path: str, body: Any, param: str | None, code: str) -> None:
    assert await refused(s, path, body) == (400, param, code)


async def test_an_unknown_model_does_not_exist(s: Stack) -> None:
    assert await refused(s, "/tokenize", {"model": "other", "prompt": "a"}) == (404, "model", "model_not_found")
    assert await refused(s, "/detokenize", {"model": "other", "tokens": [1]}) == (404, "model", "model_not_found")


async def test_what_fits_no_context_is_refused_before_any_worker_reads_it() -> None:
    async with serving(max_tokens=MAX_MODEL_LEN, longest_token_bytes=4, message_token_bytes=4) as bounded:
        await refuses_what_fits_no_context(bounded)


async def refuses_what_fits_no_context(bounded: Stack) -> None:
    long = "x" * (4 * MAX_MODEL_LEN)
    for body, param in (
        ({"prompt": long}, "prompt"),
        ({"messages": [{"role": "user", "content": long}]}, "messages"),
        ({"prompt": long, "nonsense": 1}, "prompt"),
    ):
        assert await refused(bounded, "/tokenize", body) == (400, param, "context_length_exceeded")
    assert await refused(bounded, "/detokenize", {"tokens": [1] * (MAX_MODEL_LEN + 1)}) == (
        400,
        "tokens",
        "context_length_exceeded",
    )
    assert not bounded.workers[0].asked
    assert (await post(bounded, "/tokenize", {"prompt": "x" * (4 * MAX_MODEL_LEN - 4)}))[0] == 200, "that may fit"
    assert (await post(bounded, "/detokenize", {"tokens": [97] * MAX_MODEL_LEN}))[0] == 200


async def test_large_bodies_are_read_by_helpers_and_give_the_same_answer() -> None:
    text = "a,{[:" * 60_000
    async with serving(max_tokens=1 << 20) as s:
        status, answer = await post(s, "/tokenize", {"prompt": text})
        assert status == 200 and answer["count"] == len(text) and answer["tokens"] == [ord(c) for c in text]
        assert await post(s, "/detokenize", {"tokens": answer["tokens"]}) == (200, {"prompt": text})
        tokens = [97] * 50_000 + [-1]
        assert await refused(s, "/detokenize", {"tokens": tokens}) == (400, "tokens[50000]", "invalid_type")


async def test_what_a_worker_refuses_is_its_callers_error(s: Stack) -> None:
    for worker in s.workers:
        worker.refuse_question = Unavailable(
            "too many of this tenant's prompts wait to be read; try again", code="overloaded"
        )
    try:
        assert await refused(s, "/tokenize", {"prompt": "a"}) == (503, None, "overloaded")
    finally:
        for worker in s.workers:
            worker.refuse_question = None


async def test_a_request_may_be_pinned_to_a_node(s: Stack) -> None:
    for node in ("node-1", "node-0"):
        async with s.http.post(f"{s.url}/tokenize", json={"prompt": "a"}, headers={"X-Upbeat-Node": node}) as answer:
            assert answer.status == 200 and answer.headers["X-Upbeat-Node"] == node
    status, answer = await post(s, "/tokenize", {"prompt": "a"}, **{"X-Upbeat-Node": "node-77"})
    assert (status, answer["error"]["code"]) == (400, "unknown_node")


async def test_another_node_answers_when_one_has_gone_and_nobody_when_all_have() -> None:
    async with stack(2) as s:
        await s.workers[0].kill()

        async def other_answers() -> bool:
            return (await post(s, "/tokenize", {"prompt": "a"}))[0] == 200 and bool(s.workers[1].asked)

        await until(other_answers)
        await s.workers[1].kill()
        status, answer = await post(s, "/tokenize", {"prompt": "a"})
        assert (status, answer["error"]["code"]) == (503, "unavailable")


async def test_a_worker_that_does_not_answer_is_not_waited_for_for_ever() -> None:
    retry_limits = RetryLimits(
        total_s=5.0, pause_s=0.05, scheduler_s=0.4, scheduler_rest_s=1.0, connect_s=0.5, accept_s=0.5
    )
    async with stack(1, retry_limits=retry_limits) as s:
        s.workers[0].stuck = True
        status, answer = await post(s, "/tokenize", {"prompt": "a"})
        assert status == 503 and "did not answer within 0.5 s" in answer["error"]["message"]


async def test_it_counts_toward_a_tenants_requests_and_not_its_tokens() -> None:
    async with stack(1, limits={"requests_per_min": 2, "tokens_per_min": 10}, retry_limits=QUICK) as s:
        for _ in range(2):
            async with s.http.post(f"{s.url}/tokenize", json={"prompt": "x" * 1000}) as answer:
                assert answer.status == 200 and answer.headers["x-ratelimit-remaining-tokens"] == "10"
        assert await refused(s, "/detokenize", {"tokens": [1]}) == (429, None, "rate_limit_exceeded")


async def test_a_gateway_that_is_full_says_so_and_goes_on_afterwards() -> None:
    async with stack(1, max_requests=1, queue_s=0.1) as s:
        s.workers[0].stuck = True
        waiting = asyncio.create_task(post(s, "/tokenize", {"prompt": "a"}))
        await until(lambda: bool(s.workers[0].asked))
        assert await refused(s, "/tokenize", {"prompt": "a"}) == (503, None, "overloaded")
        waiting.cancel()
        s.workers[0].stuck = False

        async def answers() -> bool:
            return (await post(s, "/tokenize", {"prompt": "a"}))[0] == 200

        await until(answers)


# ---- answers in pieces -----------------------------------------------------------------------------------------------
@given(
    st.lists(st.integers(0, (1 << 31) - 1), max_size=40),
    st.none() | st.lists(st.text(), max_size=40),
    st.integers(1, 9),
)
def test_pieces_make_the_same_json_whatever_their_size(tokens: list[int], strs: list[str] | None, size: int) -> None:
    before, token_answers.SLICE = token_answers.SLICE, size
    try:
        made = json.loads(b"".join(tokenized(tokens, strs, 7)))
    finally:
        token_answers.SLICE = before
    assert made == {"count": len(tokens), "max_model_len": 7, "tokens": tokens, "token_strs": strs}


@given(st.text(max_size=60), st.integers(1, 9))
def test_text_in_pieces_is_the_same_text(text: str, size: int) -> None:
    before, token_answers.SLICE_CHARS = token_answers.SLICE_CHARS, size
    try:
        assert json.loads(b"".join(detokenized(text))) == {"prompt": text}
    finally:
        token_answers.SLICE_CHARS = before


def test_no_piece_of_the_longest_answer_is_long() -> None:
    assert max(map(len, tokenized(range(MOST_TOKENS), None, 1))) < 64 << 10
