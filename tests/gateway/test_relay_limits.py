"""Relayed requests and what their callers may use: keys, priorities, tokens, sizes, memory, slots."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fake_sidecar import PROMPT_TOKENS, HttpStack, failure, head_of, http_stack
from gateway_fakes import MODEL, until

from contracts.errors import Unavailable
from gateway import metrics
from gateway.core.bodies import LIGHT_TEXT_BYTES
from gateway.decoding import Decoding
from gateway.relay import WHOLE_BYTES

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
KEYS = [
    {"key": "key-of-tenant-a-with-enough-characters", "tenant": "a", "max_priority": -5},
    {"key": "key-of-tenant-b-with-enough-characters", "tenant": "b"},
]
A, B = ({"Authorization": f"Bearer {key['key']}"} for key in KEYS)


def body(text: str = "hi", **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 9, **more}


def picture(size: int) -> dict[str, Any]:
    """A chat with an image of `size` bytes."""
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{'iVBORw0K' * (size // 8)}"}},
        {"type": "text", "text": "what is this?"},
    ]
    return {"model": MODEL, "messages": [{"role": "user", "content": parts}]}


@pytest.fixture
async def s() -> AsyncIterator[HttpStack]:
    async with http_stack(api_keys=KEYS) as running:
        yield running


# ---- keys ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", ["/v1/completions", MESSAGES, "/v1/messages/count_tokens", "/v1/embeddings", CHAT])
async def test_every_route_needs_a_key(s: HttpStack, path: str) -> None:
    for key in ({}, {"Authorization": "Bearer no"}, {"Authorization": "Bearer ek_no"}):
        status, answer, _ = await s.raw(path, b"not even JSON", **key)
        assert status == 401 and ("type" in json.loads(answer)) is path.startswith(MESSAGES)
    assert not s.heard


async def test_anthropics_clients_send_the_key_in_a_header_of_theirs(s: HttpStack) -> None:
    key = KEYS[1]["key"]
    for path in (MESSAGES, "/v1/messages/count_tokens"):
        assert (await s.raw(path, body(), X_Api_Key=key))[0] == 200
    assert {heard.head.tenant for heard in s.heard} == {"b"}
    assert (await s.raw(CHAT, body(), X_Api_Key=key))[0] == 401, "OpenAI's do not"
    assert (await s.raw(MESSAGES, body(), X_Api_Key=key, Authorization="Bearer no"))[0] == 401
    assert (await s.raw(MESSAGES, body(), X_Api_Key="no"))[0] == 401


async def test_a_request_is_its_keys_tenants_whatever_its_body_says(s: HttpStack) -> None:
    theirs = body(tenant="b", cache_salt="b", kv_transfer_params={"upbeat": {"tenant": "b"}}, session_id="s-1")
    for key in (A, B):
        assert (await s.raw(CHAT, theirs, **key))[0] == 200
    assert [heard.head.tenant for heard in s.heard] == ["a", "b"]
    assert [placed.session.tenant for placed in s.scheduler.placed] == ["a", "b"]


async def test_conversations_of_two_tenants_are_never_one(s: HttpStack) -> None:
    async def session(key: dict[str, str], *messages: dict[str, str]) -> str:
        _, _, headers = await s.raw(CHAT, body(messages=list(messages)), **key)
        return headers["X-Session-Id"]

    user, assistant = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello my friend"}
    first = await session(A, user)
    assert await session(A, user, assistant, user) == first
    assert await session(B, user, assistant, user) != first


@pytest.mark.parametrize(("wanted", "key", "got"), [(-9, A, -5), (-9, B, 0), (7, B, 7), (10**9, B, 1000), (None, A, 0)])
async def test_a_priority_is_limited_to_the_keys(s: HttpStack, wanted: Any, key: dict[str, str], got: int) -> None:
    await s.raw(CHAT, body(priority=wanted), **key)
    await s.raw(MESSAGES, body(nvext={"agent_hints": {"priority": -wanted if wanted else None}}), **key)
    assert [heard.head.priority for heard in s.heard] == [got, got]
    assert [placed.priority for placed in s.scheduler.placed] == [got, got]


# ---- tokens ----------------------------------------------------------------------------------------------------------
def left(headers: Any) -> int:
    return int(headers["x-ratelimit-remaining-tokens"])


@pytest.mark.parametrize("path", [CHAT, MESSAGES, "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_turn_uses_the_tokens_that_its_answer_states(path: str, stream: bool) -> None:
    async with http_stack(1, limits={"tokens_per_day": 10_000}) as s:
        sent = body(stream=stream, stream_options={"include_usage": True}, input="hi", prompt="hi")
        assert (await s.raw(path, sent))[0] == 200
        assert used(s) == PROMPT_TOKENS + 3


def used(s: HttpStack) -> int:
    """Tokens of today."""
    assert s.gateway.parts is not None
    (tenant,) = s.gateway.parts.usage._tenants.values()
    return tenant.windows[0][0].used


async def test_a_stream_that_states_none_uses_what_it_looks_like() -> None:
    async with http_stack(1, limits={"tokens_per_day": 10_000}) as s:
        await s.raw(CHAT, body("x" * 400, stream=True))
        assert used(s) == 100 + 5, "five events"


async def test_few_long_events_are_no_way_around_a_limit() -> None:
    async with http_stack(1, limits={"tokens_per_day": 10_000}) as s:
        s.sidecars[0].tokens = ["word " * 1000]
        await s.raw(CHAT, body(stream=True, stream_interval=1000))
        assert used(s) > 800


async def test_embeddings_use_their_prompts_and_tokenizers_nothing() -> None:
    async with http_stack(1, limits={"tokens_per_day": 10_000}) as s:
        for path in ("/tokenize", "/detokenize", "/v1/messages/count_tokens"):
            await s.raw(path, body(prompt="a", tokens=[1]))
            assert used(s) == 0
        await s.raw("/v1/embeddings", body(input="hi"))
        await until(lambda: used(s) == PROMPT_TOKENS)


@pytest.mark.parametrize("status", [400, 500])
async def test_what_the_engine_refuses_uses_no_tokens(status: int) -> None:
    async with http_stack(1, limits={"tokens_per_day": 10_000}) as s:
        s.sidecars[0].answers = head_of("application/json", status), [b'{"usage": {"prompt_tokens": 5}}']
        await s.raw(CHAT, body())
        assert used(s) == 0


async def test_attempts_that_fail_use_no_tokens() -> None:
    async with http_stack(3, limits={"tokens_per_day": 10_000}) as s:
        for sidecar in s.sidecars:
            sidecar.breaks_after, sidecar.ends_with = 2, failure(Unavailable("died"), ran=True)
            sidecar.piece_bytes = 40
        before = metrics.TOKENS.labels("prompt", MODEL)._value.get()
        assert (await s.raw(CHAT, body("x" * 400)))[0] == 503
        assert used(s) == 0 and metrics.TOKENS.labels("prompt", MODEL)._value.get() == before


async def test_a_stream_that_breaks_off_uses_what_came_of_it() -> None:
    async with http_stack(1, limits={"tokens_per_day": 10_000}) as s:
        s.sidecars[0].breaks_after = 4
        going = asyncio.create_task(s.raw(CHAT, body("x" * 400, stream=True)))
        await until(lambda: len(s.heard) == 1)
        await asyncio.sleep(0.2)
        going.cancel()
        await s.whole()
        assert used(s) == 100 + 4


async def test_a_whole_answer_that_is_not_waited_for_uses_its_prompt() -> None:
    async with http_stack(1, limits={"tokens_per_day": 10_000}) as s:
        s.sidecars[0].pace_s = 60
        going = asyncio.create_task(s.raw(CHAT, body("x" * 400)))
        await until(lambda: len(s.heard) == 1)
        await asyncio.sleep(0.1)
        going.cancel()
        await s.whole()
        assert used(s) == 100


async def test_a_tenant_over_a_limit_gets_429_before_any_engine_hears_of_it() -> None:
    async with http_stack(1, limits={"tokens_per_min": 60}) as s:
        status, _, headers = await s.raw(CHAT, body())
        assert status == 200 and left(headers) == 60 - PROMPT_TOKENS - 3
        for path in (MESSAGES, "/v1/embeddings"):
            status, answer, _ = await s.raw(path, body("x" * 400, input="x" * 400))
            assert (status, json.loads(answer)["error"]["code"]) == (429, "rate_limit_exceeded")
        assert len(s.heard) == 1
    async with http_stack(1, limits={"concurrent": 1}) as s:
        s.sidecars[0].pace_s = 0.2
        going = asyncio.create_task(s.raw(CHAT, body()))
        await until(lambda: len(s.heard) == 1)
        assert (await s.raw("/tokenize", body(prompt="a")))[0] == 429, "one at a time"
        await going


async def test_a_slot_is_held_until_the_answer_has_ended() -> None:
    async with http_stack(1, max_requests=1, queue_s=0.2) as s:
        s.sidecars[0].tokens, s.sidecars[0].pace_s = ["a "] * 10, 0.1
        going = asyncio.create_task(s.raw(CHAT, body(stream=True)))
        await until(lambda: len(s.heard) == 1)
        status, answer, _ = await s.raw(MESSAGES, body())
        assert (status, json.loads(answer)["error"]["code"]) == (503, "overloaded")
        await going
        assert (await s.raw(MESSAGES, body()))[0] == 200


# ---- sizes -----------------------------------------------------------------------------------------------------------
async def test_a_large_image_is_decoded_in_a_helper_and_passes_whole(s: HttpStack) -> None:
    sent, before = picture(10 << 20), metrics.HEAVY._value.get()
    assert (await s.raw(CHAT, sent | {"kv_transfer_params": {}, "odd": 1}, **A))[0] == 200
    (heard,) = s.heard
    assert heard.body == sent | {"odd": 1} and metrics.HEAVY._value.get() == before + 1
    assert 1000 < heard.head.prompt_tokens < 1100, "an image is not as long as its bytes"
    await s.raw(CHAT, picture(LIGHT_TEXT_BYTES // 2), **A)
    assert metrics.HEAVY._value.get() == before + 1, "a small one is decoded here"


async def test_a_large_conversation_is_recognised_as_a_small_one_is(s: HttpStack) -> None:
    first = picture(1 << 20)
    _, _, headers = await s.raw(CHAT, first, **A)
    back = [{"role": "assistant", "content": "Hello my friend"}, {"role": "user", "content": "and now?"}]
    _, _, again = await s.raw(CHAT, first | {"messages": first["messages"] + back}, **A)
    assert headers["X-Session-Id"] == again["X-Session-Id"]


async def test_a_body_over_the_limit_is_refused_and_one_below_it_holds_what_it_is() -> None:
    async with http_stack(1, max_body_bytes=1 << 20, body_memory_bytes=4 << 20) as s:
        status, answer, _ = await s.raw(CHAT, picture(2 << 20))
        assert (status, json.loads(answer)["error"]["code"]) == (413, "body_too_large")
        s.sidecars[0].breaks_after = 0
        going = asyncio.create_task(s.raw(CHAT, picture(900_000)))
        await until(lambda: len(s.heard) == 1)
        assert s.gateway.parts is not None and s.gateway.parts.bodies.held == len(s.heard[0].raw)
        going.cancel()
        await s.whole()


async def test_a_stream_holds_no_memory_for_its_body() -> None:
    async with http_stack(1) as s:
        s.sidecars[0].breaks_after = 1
        going = asyncio.create_task(s.raw(CHAT, picture(900_000) | {"stream": True}))
        await until(lambda: len(s.heard) == 1)
        assert s.gateway.parts is not None
        bodies = s.gateway.parts.bodies
        await until(lambda: bodies.held < 1000)
        going.cancel()


async def test_an_answer_counts_in_the_callers_memory_and_passes_unheld_when_there_is_none() -> None:
    async with http_stack(1, body_memory_bytes=2 << 20, max_body_bytes=1 << 20) as s:
        s.sidecars[0].answers = head_of("application/json"), [b"x" * (1 << 20)] * 6
        status, answer, headers = await s.raw(CHAT, body())
        assert (status, len(answer)) == (200, 6 << 20) and "total" not in headers["Server-Timing"]


async def test_a_large_answer_is_read_in_a_helper_and_states_its_tokens() -> None:
    async with http_stack(1, limits={"tokens_per_day": 10_000_000}) as s:
        rows = [{"index": i, "embedding": [0.123456] * 1024} for i in range(100)]
        usage = {"prompt_tokens": 4321, "total_tokens": 4321}
        said = json.dumps({"data": rows, "usage": usage}).encode()
        assert LIGHT_TEXT_BYTES < len(said) < WHOLE_BYTES
        s.sidecars[0].answers = head_of("application/json"), [said]
        before = metrics.HEAVY._value.get()
        assert (await s.raw("/v1/embeddings", body(input="hi")))[1] == said
        await until(lambda: used(s) == 4321)
        assert metrics.HEAVY._value.get() == before + 1


async def test_a_caller_that_leaves_with_a_large_answer_has_used_it() -> None:
    async with http_stack(1, limits={"tokens_per_day": 10_000_000}) as s:
        assert s.gateway.parts is not None
        choice = {"index": 0, "message": {"content": "word " * 100_000}}
        s.sidecars[0].answers = head_of("application/json"), [json.dumps({"choices": [choice]}).encode()]
        await s.gateway.parts.decoding.close()
        sleeps = "import time; from runtime.child import serve; serve(lambda _: time.sleep(1e3))"
        s.gateway.parts.decoding = Decoding(2, 192 << 20, (sys.executable, "-c", sleeps))
        async with s.http.post(s.url + CHAT, json=body(session_id="s"), headers={"Connection": "close"}) as answer:
            assert len(await answer.read()) > 500_000
        await s.whole()
        assert used(s) > 50_000


async def test_an_answer_that_is_too_long_to_be_read_is_counted_by_its_length() -> None:
    async with http_stack(1, limits={"tokens_per_day": 100_000_000}) as s:
        s.sidecars[0].answers = head_of("application/json"), [b"x" * (1 << 20)] * 9
        assert (await s.raw(CHAT, body()))[0] == 200
        assert used(s) > (9 << 20) // 8
        assert (await s.raw("/v1/embeddings", body(input="x" * 400)))[0] == 200
        assert used(s) < (9 << 20) // 4, "embeddings have no tokens of an answer"
