"""OpenAI's wire format, and the official client, unmodified."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from gateway_fakes import MODEL, Stack, events, stack, until

from contracts.errors import Unavailable
from gateway.core.retry import RetryLimits


@pytest.fixture
async def s() -> Any:
    async with stack() as running:
        yield running


def client(s: Stack) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{s.url}/v1", api_key="unused", max_retries=0)


async def test_a_chat_answer_has_openais_fields(s: Stack) -> None:
    status, body, headers = await s.chat(session_id="abc", max_tokens=3)
    assert status == 200
    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["model"], body["system_fingerprint"]) == ("chat.completion", MODEL, None)
    choice = body["choices"][0]
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    assert choice["message"]["role"] == "assistant" and len(choice["message"]["content"].split()) == 3
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (11, 3, 14)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 3
    assert (headers["X-Session-Id"], headers["X-Upbeat-Node"], headers["X-Upbeat-Why"]) == (
        "abc",
        "node-0",
        "first free",
    )


async def test_a_stream_opens_with_the_role_and_ends_with_usage_and_done(s: Stack) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "x"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with s.http.post(f"{s.url}/v1/chat/completions", json=body) as r:
        assert r.headers["Content-Type"].startswith("text/event-stream")
        chunks = await events(r)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1] == "[DONE]"
    assert chunks[-2]["choices"] == [] and chunks[-2]["usage"]["completion_tokens"] == 5
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-2]] == [None] * 6 + ["length"]
    assert {c["object"] for c in chunks[:-1]} == {"chat.completion.chunk"} and len({c["id"] for c in chunks[:-1]}) == 1


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
async def test_a_stream_begins_when_it_is_accepted_and_its_end_is_one_piece(s: Stack, route: str) -> None:
    said = {"prompt": "x"} if route == "completions" else {"messages": [{"role": "user", "content": "x"}]}
    body = {"model": MODEL, **said, "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}
    s.workers[0].token_s = 0.2
    async with s.http.post(f"{s.url}/v1/{route}", json=body) as r:
        pieces, piece = [], b""
        async for data, whole in r.content.iter_chunks():
            piece += data
            if whole:
                pieces.append(piece)
                piece = b""
    if route == "chat/completions":
        assert pieces[0].count(b"data: ") == 1 and b'"role":"assistant"' in pieces[0], (
            "the role is there before any token"
        )
    ends = pieces[-1].split(b"\n\n")
    assert (
        b'"finish_reason":"length"' in ends[-4]
        and b'"total_tokens"' in ends[-3]
        and ends[-2:] == [b"data: [DONE]", b""]
    )


async def test_streamed_and_whole_answers_are_equal_token_for_token(s: Stack) -> None:
    _, whole, _ = await s.chat(seed=7)
    async with s.http.post(
        f"{s.url}/v1/chat/completions",
        json={"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "seed": 7, "stream": True},
    ) as r:
        chunks = await events(r)
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1])
    assert text == whole["choices"][0]["message"]["content"]


@pytest.mark.parametrize("stream", [False, True])
async def test_n_choices_differ_and_each_is_reproducible(s: Stack, stream: bool) -> None:
    async def texts() -> list[str]:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "n": 3, "seed": 1, "stream": stream}
        async with s.http.post(f"{s.url}/v1/chat/completions", json=body) as r:
            if not stream:
                return [c["message"]["content"] for c in (await r.json())["choices"]]
            found = ["", "", ""]
            for chunk in (await events(r))[:-1]:
                choice = chunk["choices"][0]
                found[choice["index"]] += choice["delta"].get("content", "")
            return found

    first = await texts()
    assert len(set(first)) == 3 and all(first)
    assert await texts() == first
    _, one, _ = await s.chat("x", seed=1)
    assert one["choices"][0]["message"]["content"] == first[0]


async def test_every_sampling_parameter_reaches_the_worker(s: Stack) -> None:
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 11,
        "max_completion_tokens": 2,
        "stop": "END",
        "ignore_eos": True,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.5,
        "logit_bias": {"17": -100, "5": 2.5},
        "logprobs": True,
        "top_logprobs": 4,
        "priority": -3,
    }
    status, _, _ = await s.chat(**given)
    assert status == 200
    request = s.workers[0].submitted[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed) == (
        0.5,
        0.9,
        7,
        0.1,
        11,
    )
    assert (sampling.max_tokens, sampling.stop, sampling.ignore_eos) == (2, ["END"], True)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.logprobs) == (0.25, -0.5, 4)
    assert sampling.logit_bias == {17: -100.0, 5: 2.5}
    assert (request.priority, s.scheduler.placed[0].priority) == (-3, -3)
    assert request.source_nodes == ["node-9"] and request.kept_tokens == 900


async def test_defaults_are_openais_and_an_unseeded_request_gets_a_seed(s: Stack) -> None:
    await s.chat()
    sampling = s.workers[0].submitted[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.stop, sampling.logprobs) == (
        1.0,
        1.0,
        None,
        [],
        None,
    )
    assert sampling.seed is not None


async def test_harmless_fields_and_idle_values_are_accepted(s: Stack) -> None:
    status, body, _ = await s.chat(
        user="u", metadata={"a": "b"}, store=False, service_tier="auto", safety_identifier="x",
        parallel_tool_calls=True, nvext={"x": 1},
        kv_hints=None, agent_hint={}, prompt_cache_retention="24h", verbosity="low", response_format={"type": "text"},
        tools=[],
        tool_choice="none", stream_options=None, temperature=None,
    )  # fmt: skip
    assert status == 200, body


async def test_text_parts_are_joined_and_developers_are_systems(s: Stack) -> None:
    messages = [
        {"role": "developer", "content": "be"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": "c",
            "refusal": None,
            "annotations": [],
            "audio": None,
            "function_call": None,
            "tool_calls": None,
        },
        {"role": "user", "content": "d", "name": "Ada"},
    ]
    status, body, _ = await s.post("/v1/chat/completions", {"model": MODEL, "messages": messages})
    assert status == 200, body
    sent = s.workers[0].submitted[0].messages
    assert sent == [
        {"role": r, "content": c} for r, c in (("system", "be"), ("user", "ab"), ("assistant", "c"), ("user", "d"))
    ]


async def test_chat_logprobs_have_openais_form(s: Stack) -> None:
    _, body, _ = await s.chat(logprobs=True, top_logprobs=2, max_tokens=2)
    content = body["choices"][0]["logprobs"]["content"]
    assert len(content) == 2
    assert content[0]["logprob"] == -0.5 and bytes(content[0]["bytes"]).decode() == content[0]["token"]
    assert [t["logprob"] for t in content[0]["top_logprobs"]] == [-0.5, -1.0]


async def test_completions_take_text_tokens_and_several_prompts(s: Stack) -> None:
    for prompt in ("abc", ["abc"], [1, 2, 3], [[1, 2, 3]]):
        status, body, _ = await s.post(
            "/v1/completions", {"model": MODEL, "prompt": prompt, "max_tokens": 2, "logprobs": 1}
        )
        assert status == 200, body
        assert body["object"] == "text_completion" and len(body["choices"][0]["text"].split()) == 2
        assert body["choices"][0]["logprobs"]["text_offset"][0] == 0
    assert [r.prompt_tokens for r in s.workers[0].submitted] == [None, None, [1, 2, 3], [1, 2, 3]]
    _, body, _ = await s.post("/v1/completions", {"model": MODEL, "prompt": ["a", "b"], "n": 2, "seed": 3})
    assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3] and len({c["text"] for c in body["choices"]}) == 4
    assert body["usage"]["completion_tokens"] == 4 * 16, "OpenAI's default for completions"


async def test_the_official_client_holds_a_streaming_conversation_in_one_session(s: Stack) -> None:
    chat, messages, sessions = client(s), [{"role": "system", "content": "be brief"}], []
    for turn in range(4):
        messages.append({"role": "user", "content": f"question {turn}"})
        raw = await chat.chat.completions.with_raw_response.create(
            model=MODEL, messages=messages, stream=True, stream_options={"include_usage": True}
        )
        sessions.append(raw.headers["x-session-id"])
        text, usage = "", None
        async for chunk in raw.parse():
            usage = chunk.usage or usage
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        assert usage is not None and usage.completion_tokens == 5 and len(text.split()) == 5
        messages.append({"role": "assistant", "content": text})
    assert len(set(sessions)) == 1
    assert [r.session_id for r in s.workers[0].submitted] == sessions
    await chat.close()


async def test_the_official_client_holds_a_whole_conversation_in_one_session(s: Stack) -> None:
    chat, messages = client(s), []
    for turn in range(3):
        messages.append({"role": "user", "content": f"question {turn}"})
        answer = await chat.chat.completions.create(model=MODEL, messages=messages)
        messages.append(answer.choices[0].message.model_dump())
    assert len({r.session_id for r in s.workers[0].submitted}) == 1
    assert len(s.workers[0].submitted) == 3
    completion = await chat.completions.create(model=MODEL, prompt="once")
    assert completion.choices[0].text
    assert [m.id async for m in chat.models.list()] == [MODEL]
    assert (await chat.models.retrieve(MODEL)).owned_by == "upbeat"
    await chat.close()


async def test_the_official_client_raises_its_own_errors(s: Stack) -> None:
    chat = client(s)
    with pytest.raises(openai.NotFoundError) as unknown:
        await chat.chat.completions.create(model="none", messages=[{"role": "user", "content": "x"}])
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as long:
        await chat.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x" * 3000}], stream=True)
    assert long.value.code == "context_length_exceeded"
    await chat.close()


async def test_the_official_client_comes_back_after_a_503() -> None:
    async with stack(1, retry_limits=RetryLimits(total_s=0.0, pause_s=0.0)) as s:
        s.workers[0].refuse = Unavailable("full")
        with pytest.raises(openai.InternalServerError) as e:
            await client(s).chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])
        assert (e.value.status_code, e.value.response.headers["Retry-After"]) == (503, "1")
        patient = client(s).with_options(max_retries=2)
        asked = asyncio.create_task(
            patient.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])
        )
        await until(lambda: len(s.workers[0].submitted) == 2)
        await asyncio.sleep(0.1)  # it has been refused by now, and is not asked again before a second has passed
        s.workers[0].refuse = None
        assert (await asked).choices[0].message.content and len(s.workers[0].submitted) == 3


async def test_the_description_lists_every_route_and_resolves_every_reference(s: Stack) -> None:
    status, document = await s.get("/openapi.json")
    assert status == 200
    names = set(document["components"]["schemas"])
    wanted = {
        line.split("/")[-1] for line in json.dumps(document).split('"') if line.startswith("#/components/schemas/")
    }
    assert wanted <= names and "Message" in names
    answers = {
        line.split("/")[-1] for line in json.dumps(document).split('"') if line.startswith("#/components/responses/")
    }
    assert answers == set(document["components"]["responses"])
    paths = set(document["paths"])
    for path, word in (("/", "playground"), ("/docs", "Upbeat API")):
        async with s.http.get(s.url + path) as r:
            assert r.status == 200 and word in await r.text()
    assert {"/v1/chat/completions", "/v1/advisory", "/v1/sessions/{session_id}", "/ready"} <= paths
