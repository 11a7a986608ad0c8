"""`/v1/messages` over Upbeat's own engine: Anthropic's client and its types read every event, message and error."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest
from anthropic.types import ErrorResponse, Message, RawMessageStreamEvent
from gateway_fakes import MODEL, Stack, stack
from pydantic import TypeAdapter

from contracts.models import ModelWire
from gateway.anthropic.requests import IGNORED, PASSED, REFUSED, MessageRequest
from gateway.openai.asked import Asked, Told
from gateway.openai.token_requests import TokensAsked
from gateway.translating import _read, ask_count, ask_message

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {"n": {}}}}
USER = {"role": "user", "content": "hello"}
#: As Claude Code names its session: a device's hash, an account, and the session.
SESSION = "b4e5aaaa-9a3e-47c4-84ad-3a70f38c676e"


@pytest.fixture
async def s() -> Any:
    async with stack() as running:
        yield running


def body(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [USER], "max_tokens": 5, **more}


async def ask(s: Stack, **more: Any) -> Any:
    """The message, checked by Anthropic's own type."""
    status, made, _ = await s.post("/v1/messages", body(**more))
    assert status == 200, made
    Message.model_validate(made, strict=True)
    return made


async def streamed(s: Stack, **more: Any) -> list[dict[str, Any]]:
    """The events, each checked by Anthropic's own type, and their names."""
    async with s.http.post(f"{s.url}/v1/messages", json=body(stream=True, **more)) as r:
        assert r.status == 200 and r.content_type == "text/event-stream", await r.text()
        text = (await r.read()).decode()
    found = []
    for event in text.split("\n\n")[:-1]:
        if not event.startswith(":"):
            name, data = event.split("\n")
            value = json.loads(data.removeprefix("data: "))
            assert name == f"event: {value['type']}"
            EVENT.validate_python(value)
            found.append(value)
    return found


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """The types in order, of blocks and deltas with their own; what repeats once."""
    made: list[str] = []
    for event in events:
        kind = event["type"]
        kind += f" {event['content_block']['type']}" if kind == "content_block_start" else ""
        kind = event["delta"]["type"] if kind == "content_block_delta" else kind
        if not made or made[-1] != kind:
            made.append(kind)
    return made


async def test_a_stream_and_a_whole_answer_say_the_same(s: Stack) -> None:
    whole = await ask(s, temperature=0)
    events = await streamed(s, temperature=0)
    assert kinds(events) == [
        "message_start", "content_block_start text", "text_delta", "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    text = "".join(e["delta"]["text"] for e in events if e["type"] == "content_block_delta")
    assert whole["content"] == [{"type": "text", "text": text}] and whole["stop_reason"] == "max_tokens"
    start, end = events[0]["message"], events[-2]
    assert start["usage"] == whole["usage"] | {"output_tokens": 0} and end["usage"] == whole["usage"]
    assert whole["usage"]["cache_read_input_tokens"] == 3
    assert end["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}


async def test_thoughts_are_blocks_where_they_are_asked_for(s: Stack) -> None:
    for worker in s.workers:
        worker.says, worker.thinking = ["I ", "think", "</think>", "so", "!"], True
    events = await streamed(s, thinking={"type": "enabled", "budget_tokens": 1024})
    assert kinds(events)[1:9] == [
        "content_block_start thinking", "thinking_delta", "signature_delta", "content_block_stop",
        "content_block_start text", "text_delta", "content_block_stop", "message_delta",
    ]  # fmt: skip
    assert [e["index"] for e in events if e["type"] == "content_block_start"] == [0, 1]
    whole = await ask(s, thinking={"type": "adaptive"})
    assert [b["type"] for b in whole["content"]] == ["thinking", "text"]
    assert whole["content"][0]["thinking"] == "I think"
    assert [b["type"] for b in (await ask(s))["content"]] == ["text"]
    sent = [json.loads(w.template_kwargs or "{}") for w in s.workers[0].submitted]
    assert [kwargs.get("enable_thinking") for kwargs in sent] == [True, None, False]


async def test_tools_are_used_and_their_results_go_back(s: Stack) -> None:
    given: Any = {"tools": [TOOL], "tool_choice": {"type": "any"}}
    events = await streamed(s, **given)
    assert kinds(events)[1:4] == ["content_block_start tool_use", "input_json_delta", "content_block_stop"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    whole = await ask(s, **given)
    [use] = whole["content"]
    assert use["name"] == "f" and len(use["input"]["n"]) == 4 and whole["stop_reason"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "42"}]}
    history = [USER, {"role": "assistant", "content": [{"type": "text", "text": "I look."}, use]},
               {"role": "user", "content": [result, {"type": "text", "text": "And?"}]}]  # fmt: skip
    await ask(s, messages=history, system="Be brief.", tools=[TOOL])
    sent = s.workers[0].submitted[-1]
    arguments = json.dumps(use["input"])
    assert sent.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "I look.", "tool_calls": [
            {"id": use["id"], "type": "function", "function": {"name": "f", "arguments": arguments}}
        ]},
        {"role": "tool", "content": "42", "tool_call_id": use["id"]},
        {"role": "user", "content": "And?"},
    ]  # fmt: skip
    assert sent.tool_use is not None and sent.tool_use.choice == "auto"


async def test_fields_reach_the_worker(s: Stack) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    await ask(
        s, temperature=0.25, top_p=0.5, top_k=7, stop_sequences=["\n\n", "END"], max_tokens=9,
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )  # fmt: skip
    sent = s.workers[0].submitted[-1]
    sampling = sent.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.25, 0.5, 7, 9)
    assert sampling.stop == ["\n\n", "END"] and json.loads(sent.json_schema or "") == schema
    await ask(s, tools=[TOOL], tool_choice={"type": "tool", "name": "f", "disable_parallel_tool_use": True})
    use = s.workers[0].submitted[-1].tool_use
    assert use is not None and (use.choice, use.name, use.parallel) == ("required", "f", False)


async def test_what_claude_code_says_beside_the_prompt_is_taken(s: Stack) -> None:
    """Cache marks, edits of thoughts, and a block for Anthropic's billing, which would make every prompt unlike."""
    mark = {"type": "ephemeral", "ttl": "1h"}
    system = [{"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=1f3;"},
              {"type": "text", "text": "You are an agent.", "cache_control": mark},
              {"type": "text", "text": "Be brief.", "cache_control": mark}]  # fmt: skip
    block = {"type": "text", "text": "hello", "cache_control": mark}
    await ask(
        s, system=system, messages=[{"role": "user", "content": [block]}], tools=[TOOL | {"cache_control": mark}],
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        thinking={"type": "adaptive"}, output_config={"effort": "medium"},
    )  # fmt: skip
    sent = s.workers[0].submitted[-1].messages
    assert sent == [{"role": "system", "content": "You are an agent.\n\nBe brief."}, USER]


@pytest.mark.parametrize(
    "user_id",
    [
        f"user_{'0' * 64}_account_261d5434-c8c2-431f-b07d-2e480cd4622f_session_{SESSION}",
        json.dumps({"device_id": "0" * 64, "account_uuid": "", "session_id": SESSION}),
    ],
)
async def test_the_session_is_claude_codes(s: Stack, user_id: str) -> None:
    _, _, headers = await s.post("/v1/messages", body(metadata={"user_id": user_id}))
    assert headers["X-Session-Id"] == SESSION
    named = {"X-Claude-Code-Session-Id": "by-header", "X-Claude-Code-Agent-Id": "a1"}
    _, _, headers = await s.post("/v1/messages", body(metadata={"user_id": user_id}), headers=named)
    assert headers["X-Session-Id"] == "by-header.a1"
    _, _, headers = await s.post("/v1/messages", body(metadata={"user_id": user_id}, session_id="by-body"))
    assert headers["X-Session-Id"] == "by-body"
    _, _, headers = await s.post("/v1/messages", body(metadata={"user_id": "somebody"}))
    assert headers["X-Session-Id"].startswith("imp-")


async def test_a_conversation_with_calls_is_recognised(s: Stack) -> None:
    """Its arguments come back as an object, in a spelling of the client's own."""
    _, made, headers = await s.post("/v1/messages", body(tools=[TOOL], tool_choice={"type": "any"}))
    session = headers["X-Session-Id"]
    result = {"type": "tool_result", "tool_use_id": made["content"][0]["id"], "content": "42"}
    history = [USER, {"role": "assistant", "content": made["content"]}, {"role": "user", "content": [result]}]
    await s.post("/v1/messages", body(max_tokens=2), headers={})  # another conversation that begins alike
    _, _, headers = await s.post("/v1/messages", body(messages=history, tools=[TOOL]))
    assert headers["X-Session-Id"] == session


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]},
         "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "server_tool_use"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]},
         "messages[0].content[0].type"),
        ({"messages": [USER, {"role": "assistant", "content": "He"}]}, "messages[1].role"),
        ({"tools": [{"type": "web_search_20260318", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
         "context_management.edits[0].type"),
        ({"stop_sequences": "END"}, "stop_sequences"),
        ({"stop_sequences": ["a"] * 99}, "stop_sequences"),
        ({"thinking": {"type": "always"}}, "thinking.type"),
        ({"temperature": 3}, "temperature"),
        ({"unknown": 1}, "unknown"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_refused_by_name_in_anthropics_form(s: Stack, wrong: Any, named: str) -> None:
    status, answer, _ = await s.post("/v1/messages", body(**wrong))
    assert status == 400, answer
    ErrorResponse.model_validate(answer)
    assert answer["type"] == "error" and answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["param"] == named, answer


async def test_a_stream_that_breaks_off_ends_with_an_error(s: Stack) -> None:
    for worker in s.workers:
        worker.token_s = 0.05
    async with s.http.post(f"{s.url}/v1/messages", json=body(stream=True, max_tokens=500)) as r:
        await r.content.readuntil(b"text_delta")
        for worker in s.workers:
            await worker.kill()
        last = (await r.read()).decode().rstrip().split("\n\n")[-1]
    name, data = last.split("\n")
    error = json.loads(data.removeprefix("data: "))
    assert name == "event: error" and error["error"]["type"] == "overloaded_error"
    ErrorResponse.model_validate(error)


async def test_tokens_are_counted(s: Stack) -> None:
    counted = {"model": MODEL, "messages": [USER], "system": "Be brief.", "tools": [TOOL]}
    status, answer, _ = await s.post("/v1/messages/count_tokens", counted)
    assert status == 200 and set(answer) == {"input_tokens"} and answer["input_tokens"] > 0
    status, more, _ = await s.post("/v1/messages/count_tokens", body(messages=[USER, USER]))
    assert status == 200, more
    status, answer, _ = await s.post("/v1/messages/count_tokens", {"model": MODEL})
    assert (status, answer["error"]["param"]) == (400, "messages")


async def test_anthropics_client_reads_it_all(s: Stack) -> None:
    async with anthropic.AsyncAnthropic(base_url=s.url, api_key="x", max_retries=0) as client:
        given: Any = {"model": MODEL, "max_tokens": 4, "messages": [USER], "extra_body": {"temperature": 0}}
        made = await client.messages.create(**given)
        async with client.messages.stream(**given) as stream:
            assert await stream.get_final_text() == made.content[0].text  # type: ignore[union-attr]
        assert (await client.messages.count_tokens(model=MODEL, messages=given["messages"])).input_tokens > 0
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(**given | {"model": "nobody"})
        with pytest.raises(anthropic.BadRequestError):
            await client.messages.create(**given | {"extra_body": {"top_k": -5}})


@pytest.mark.parametrize("name", sorted(IGNORED))
async def test_a_field_without_effect_is_ignored(s: Stack, name: str) -> None:
    for path, asked in (("/v1/messages", body(**{name: {}})), ("/v1/messages/count_tokens", body(**{name: {}}))):
        status, said, _ = await s.post(path, asked)
        assert status == 200, said


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}},
        {"thinking": {"type": "adaptive"}, "output_config": {"effort": "none"}},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"chat_template_kwargs": {"custom": 1}},
        {"enable_thinking": True},
    ],
    ids=str,
)
def test_a_count_is_of_the_prompt_that_a_message_has(more: dict[str, Any]) -> None:
    told, asked = Told("t", False, {}, {}), body(**more)
    message, count = ask_message(asked, 100, told).asked, ask_count(asked, 100, told)
    assert isinstance(message, Asked) and isinstance(count, TokensAsked)
    assert (count.template_kwargs or "{}") == (message.template_kwargs or "{}")


@pytest.mark.parametrize("wire", [ModelWire.FRAMES, ModelWire.HTTP])
def test_what_the_api_reads_itself_is_not_given_to_the_chat_as_well(wire: ModelWire) -> None:
    asked = body(metadata={"user_id": "u"}, service_tier="auto", speed="fast")
    _, passed = _read(MessageRequest, asked, REFUSED, IGNORED, PASSED, Told("t", False, {}, {}, "", {MODEL: wire}))
    assert passed == {"service_tier": "auto"}
