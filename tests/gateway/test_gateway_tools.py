"""Tools, formats and choices between an OpenAI client and a worker: what is sent on, and what comes back in OpenAI's
shape."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from gateway_fakes import MODEL, Stack, events, stack

from contracts.errors import InvalidRequest
from contracts.request import TokenLogprob, ToolCallDelta
from gateway import sse
from gateway.openai.responses import ChatShape, Choice, CompletionShape, Usage

F = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {"n": {}}},
        "strict": True,
    },
}
G = {"type": "function", "function": {"name": "g"}}


@pytest.fixture
async def s() -> Any:
    async with stack() as running:
        yield running


async def test_a_call_has_openais_shape(s: Stack) -> None:
    status, body, _ = await s.chat(tools=[F, G], tool_choice="required")
    assert status == 200, body
    [choice] = body["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    [call] = choice["message"]["tool_calls"]
    assert set(call) == {"id", "type", "function"} and call["type"] == "function"
    assert call["function"]["name"] == "f" and len(json.loads(call["function"]["arguments"])["n"]) == 4


async def test_a_streamed_call_opens_with_its_name_and_goes_on_with_its_arguments(s: Stack) -> None:
    _, whole, _ = await s.chat(tools=[F], tool_choice="required", seed=3)
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hello"}],
        "tools": [F],
        "tool_choice": "required",
        "seed": 3,
        "stream": True,
    }
    async with s.http.post(f"{s.url}/v1/chat/completions", json=body) as r:
        chunks = (await events(r))[:-1]
    deltas = [d for c in chunks for d in c["choices"][0]["delta"].get("tool_calls", [])]
    assert set(deltas[0]) == {"index", "id", "type", "function"} and deltas[0]["function"]["name"] == "f"
    assert all(set(d) == {"index", "function"} and set(d["function"]) == {"arguments"} for d in deltas[1:])
    [call] = whole["choices"][0]["message"]["tool_calls"]
    assert "".join(d["function"]["arguments"] for d in deltas) == call["function"]["arguments"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert not any(c["choices"][0]["delta"].get("content") for c in chunks)


async def test_the_worker_is_told_what_was_asked_for(s: Stack) -> None:
    schema = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
    named = {"type": "function", "function": {"name": "g"}}
    asked: list[dict[str, Any]] = [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        {"tools": [F, G]},
        {"tools": [F, G], "tool_choice": named, "parallel_tool_calls": False},
        {"tools": [F, G], "tool_choice": "none"},
        {"tools": [], "tool_choice": "none"},
    ]
    for fields in asked:
        status, body, _ = await s.chat(**fields)
        assert status == 200, body
    sent = s.workers[0].submitted
    assert [json.loads(r.json_schema) if r.json_schema else None for r in sent] == [
        {"type": "object"},
        schema,
        None,
        None,
        None,
        None,
    ]
    assert sent[1].json_schema is not None and sent[1].json_schema.index('"b"') < sent[1].json_schema.index('"a"'), (
        "properties keep their order"
    )
    uses = [r.tool_use and (r.tool_use.choice, r.tool_use.name, r.tool_use.parallel) for r in sent]
    assert uses == [None, None, ("auto", None, True), ("required", "g", False), ("none", None, True), None]
    assert sent[2].tool_use is not None
    tools = json.loads(sent[2].tool_use.tools)
    assert tools == [{"type": "function", "function": {k: v for k, v in F["function"].items() if k != "strict"}}, G]


async def test_what_the_library_cannot_do_is_a_400_before_any_header(s: Stack) -> None:
    s.workers[0].refuse = InvalidRequest(
        "response_format cannot be enforced: no", param="response_format", code="unsupported_schema"
    )
    for stream in (False, True):
        status, body, _ = await s.chat(response_format={"type": "json_object"}, stream=stream)
        assert (status, body["error"]["param"]) == (400, "response_format") and "no" in body["error"]["message"]


async def test_calls_of_the_history_reach_the_template(s: Stack) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"n": 1}'}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "42"}]},
        {"role": "assistant", "tool_calls": [{**call, "index": 0}], "refusal": None},
        {"role": "tool", "content": "43", "tool_call_id": "call_1", "name": "f"},
    ]
    status, body, _ = await s.post("/v1/chat/completions", {"model": MODEL, "messages": messages, "tools": [F]})
    assert status == 200, body
    silent = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert s.workers[0].submitted[0].messages == [
        {"role": "user", "content": "x"}, silent, {"role": "tool", "content": "42", "tool_call_id": "call_1"},
        silent, {"role": "tool", "content": "43", "tool_call_id": "call_1"},
    ]  # fmt: skip


async def test_the_official_client_goes_on_after_a_call_in_the_same_session(s: Stack) -> None:
    client = openai.AsyncOpenAI(base_url=f"{s.url}/v1", api_key="unused", max_retries=0)
    messages: list[Any] = [{"role": "user", "content": "question"}]
    first = await client.chat.completions.create(model=MODEL, messages=messages, tools=[F], tool_choice="required")  # type: ignore[call-overload]
    message = first.choices[0].message
    messages += [message.model_dump(), {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "42"}]
    second = await client.chat.completions.create(model=MODEL, messages=messages, tools=[F])  # type: ignore[call-overload]
    assert second.choices[0].message.content
    sent = s.workers[0].submitted
    assert sent[0].session_id == sent[1].session_id, "the history with its call names the session"
    other = [
        *messages[:1],
        {**messages[1], "tool_calls": [{**messages[1]["tool_calls"][0], "function": {"name": "f", "arguments": "{}"}}]},
        messages[2],
    ]
    await client.chat.completions.create(model=MODEL, messages=other, tools=[F])  # type: ignore[call-overload]
    assert s.workers[0].submitted[2].tool_use is not None
    await client.close()


async def test_a_call_goes_on_when_its_worker_dies(s: Stack) -> None:
    _, whole, _ = await s.chat(tools=[F], tool_choice="required", seed=3, max_tokens=8)
    s.workers[0].die_after = 4
    _, moved, headers = await s.chat(tools=[F], tool_choice="required", seed=3, max_tokens=8)
    calls = [w["choices"][0]["message"]["tool_calls"][0]["function"] for w in (whole, moved)]
    assert calls[0] == calls[1] and headers["X-Upbeat-Node"] == "node-1"
    assert (
        s.workers[1].submitted[0].tool_use == s.workers[0].submitted[-1].tool_use
        and len(s.workers[1].submitted[0].resume_tokens) == 4
    )


async def test_choices_of_a_prompt_are_a_group_and_its_first_arrives_first(s: Stack) -> None:
    status, body, _ = await s.post("/v1/completions", {"model": MODEL, "prompt": ["a", "b"], "n": 3, "max_tokens": 2})
    assert status == 200 and len(body["choices"]) == 6
    sent = s.workers[0].submitted
    groups: dict[str, list[int]] = {}
    for r in sent:
        groups.setdefault(r.group, []).append(r.choice)
    assert len(groups) == 2 and all(found[0] == 0 and sorted(found) == [0, 1, 2] for found in groups.values())
    await s.chat(n=1)
    assert s.workers[0].submitted[-1].group == ""


async def test_choices_stay_a_group_when_their_worker_dies(s: Stack) -> None:
    s.workers[0].die_after, s.workers[0].token_s = 2, 0.2
    status, body, _ = await s.chat(n=3, seed=1, max_tokens=6)
    assert status == 200 and len({c["message"]["content"] for c in body["choices"]}) == 3
    moved = s.workers[1].submitted
    assert {r.choice for r in moved} == {0, 1, 2} and {r.group for r in moved} == {
        r.group for r in s.workers[0].submitted
    }


async def test_embeddings_are_refused_by_name(s: Stack) -> None:
    status, body, _ = await s.post("/v1/embeddings", {"model": MODEL, "input": "x"})
    assert (
        status == 400 and "embeddings" in body["error"]["message"] and body["error"]["code"] == "unsupported_operation"
    )


# ---- shapes
# ------------------------------------------------------------------------------------------------------------
FOX = "🦊".encode()
PIECES = [
    TokenLogprob(b"a ", -0.5, [(b"a ", -0.5), (b"b", -1.0)]),
    *(TokenLogprob(FOX[i : i + 1], -1.0, []) for i in range(4)),
    TokenLogprob(b"!", -2.0, [(b"?", -0.1)]),
]


def test_chat_logprobs_have_the_exact_bytes_of_parts_of_characters() -> None:
    shape = ChatShape("id", "m", 0, False, True)
    body = shape.whole([Choice(0, ["a 🦊!"], PIECES)], Usage(1, 6, 0))
    content = json.loads(sse.encoded(body))["choices"][0]["logprobs"]["content"]
    assert bytes(b for t in content for b in t["bytes"]) == "a 🦊!".encode()
    assert [t["token"] for t in content] == ["a ", "\ufffd", "\ufffd", "\ufffd", "\ufffd", "!"]


@pytest.mark.parametrize("cuts", [[6], [1, 2, 3], [2, 4]])
def test_legacy_logprobs_have_offsets_of_characters_streamed_or_not(cuts: list[int]) -> None:
    shape, choice = CompletionShape("id", "m", 0, False, True), Choice(0, ["a 🦊!"])
    for a, b in zip([0, *cuts], [*cuts, 6], strict=True):
        choice.logprobs += PIECES[a:b]
        shape.gather(choice)
        assert not choice.logprobs, "encoded as they come"
    whole = json.loads(sse.encoded(shape.whole([choice], Usage(1, 6, 0))))["choices"][0]["logprobs"]
    assert whole["text_offset"] == [0, 2, 2, 2, 2, 3]
    assert whole["tokens"] == ["a ", "bytes:\\xf0", "bytes:\\x9f", "bytes:\\xa6", "bytes:\\x8a", "!"]
    assert whole["top_logprobs"][0] == {"a ": -0.5, "b": -1.0} and whole["top_logprobs"][-1] == {"?": -0.1, "!": -2.0}
    shape = CompletionShape("id", "m", 0, False, True)
    parts = [
        shape.delta(0, "", PIECES[a:b])["choices"][0]["logprobs"] for a, b in zip([0, *cuts], [*cuts, 6], strict=True)
    ]
    assert {key: [x for part in parts for x in part[key]] for key in whole} == whole


def test_text_beside_a_call_is_kept_and_a_cut_call_ends_by_length() -> None:
    choice = Choice(0, ["Let me see."], finish_reason="length")
    choice.called([ToolCallDelta(0, "i", "f", "{"), ToolCallDelta(1, "j", "g", "")])
    choice.called([ToolCallDelta(1, arguments="{}")])
    body = ChatShape("id", "m", 0).whole([choice], Usage(1, 1, 0))["choices"][0]
    assert body["message"]["content"] == "Let me see." and body["finish_reason"] == "length"
    assert [(c["id"], c["function"]) for c in body["message"]["tool_calls"]] == [
        ("i", {"name": "f", "arguments": "{"}), ("j", {"name": "g", "arguments": "{}"}),
    ]  # fmt: skip
