"""`/v1/responses` over Upbeat's own engine: OpenAI's client and its types read every event and object."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from gateway_fakes import MODEL, Stack, stack, until
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
from pydantic import TypeAdapter

from gateway.responses.keeper import Keeper
from gateway.responses.requests import IGNORED

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"n": {}}}, "strict": True}


@pytest.fixture
async def s() -> Any:
    async with stack() as running:
        yield running


def body(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "hello", **more}


async def ask(s: Stack, **more: Any) -> Any:
    """The response, checked by OpenAI's own type."""
    status, made, _ = await s.post("/v1/responses", body(**more))
    assert status == 200, made
    Response.model_validate(made, strict=True)
    return made


async def streamed(s: Stack, **more: Any) -> list[dict[str, Any]]:
    """The events, each checked by OpenAI's own type: names, numbers and order."""
    async with s.http.post(f"{s.url}/v1/responses", json=body(stream=True, **more)) as r:
        assert r.status == 200 and r.content_type == "text/event-stream", await r.text()
        text = (await r.read()).decode()
    found = []
    for event in text.split("\n\n")[:-1]:
        if event.startswith(":"):
            continue
        name, data = event.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        EVENT.validate_python(value)
        found.append(value)
    assert [e["sequence_number"] for e in found] == list(range(len(found)))
    return found


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """The types in order, without `response.`; what repeats once."""
    made: list[str] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if not made or made[-1] != kind:
            made.append(kind)
    return made


TEXT = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done"]  # fmt: skip
THOUGHT = ["output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done",
           "content_part.done", "output_item.done"]  # fmt: skip
CALL = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
BEGIN = ["created", "in_progress"]


# ---- answers ---------------------------------------------------------------------------------------------------------
async def test_a_stream_and_a_whole_answer_say_the_same(s: Stack) -> None:
    whole = await ask(s, temperature=0)
    events = await streamed(s, temperature=0)
    assert kinds(events) == [*BEGIN, *TEXT, "incomplete"]  # the toy ends every answer at its limit
    last = events[-1]["response"]
    own = {"id", "created_at", "output", "completed_at"}
    assert {k: v for k, v in last.items() if k not in own} == {k: v for k, v in whole.items() if k not in own}
    assert last["output"][0]["content"] == whole["output"][0]["content"]
    assert last["status"] == "incomplete" and last["incomplete_details"] == {"reason": "max_output_tokens"}
    text = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
    assert text == whole["output"][0]["content"][0]["text"]
    assert last["usage"]["input_tokens_details"]["cached_tokens"] == 3
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["output"] == []


async def test_a_thought_comes_first_and_is_an_item_of_its_own(s: Stack) -> None:
    for worker in s.workers:
        worker.says, worker.thinking = ["I ", "think", "</think>", "so", "!"], True
    events = await streamed(s)
    assert kinds(events) == [*BEGIN, *THOUGHT, *TEXT, "incomplete"]
    reasoning, message = events[-1]["response"]["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "I think"}] and reasoning["summary"] == []
    assert message["content"][0]["text"] == "so!"
    summed = await streamed(s, reasoning={"effort": "low", "summary": "auto"})
    assert kinds(summed)[2:8] == [
        "output_item.added", "reasoning_summary_part.added", "reasoning_summary_text.delta",
        "reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done",
    ]  # fmt: skip
    whole = await ask(s, reasoning={"summary": "auto"})
    assert whole["output"][0]["summary"] == [{"type": "summary_text", "text": "I think"}]
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] >= 1


async def test_calls_are_items_and_their_results_go_back(s: Stack) -> None:
    events = await streamed(s, tools=[TOOL], tool_choice="required", seed=3)
    assert kinds(events) == [*BEGIN, *CALL, "completed"]
    [call] = events[-1]["response"]["output"]
    assert call["name"] == "f" and len(json.loads(call["arguments"])["n"]) == 4
    assert call["arguments"] == "".join(e["delta"] for e in events if e["type"].endswith("arguments.delta"))
    given = [
        {"role": "user", "content": "hello"},
        call,
        {"type": "function_call_output", "call_id": call["call_id"], "output": [{"type": "input_text", "text": "42"}]},
    ]
    await ask(s, input=given, tools=[TOOL])
    [sent] = [w.submitted[-1] for w in s.workers if w.submitted and w.submitted[-1].messages[-1]["role"] == "tool"]
    assert sent.messages == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": call["call_id"], "type": "function", "function": {"name": "f", "arguments": call["arguments"]}}
        ]},
        {"role": "tool", "content": "42", "tool_call_id": call["call_id"]},
    ]  # fmt: skip
    assert json.loads(sent.tool_use.tools)[0]["function"]["parameters"]["properties"] == {"n": {}}


async def test_fields_reach_the_worker(s: Stack) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    made = await ask(
        s,
        instructions="Be brief.",
        input=[{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "hi"}],
        text={"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}},
        temperature=0.25, top_p=0.5, max_output_tokens=7, seed=9, metadata={"k": "v"},
        reasoning={"effort": "high"}, include=["reasoning.encrypted_content"],
    )  # fmt: skip
    sent = s.workers[0].submitted[-1]
    assert sent.messages == [{"role": "system", "content": "Be brief.\n\nBe kind."}, {"role": "user", "content": "hi"}]
    sampling = sent.sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.seed) == (0.25, 0.5, 7, 9)
    assert json.loads(sent.json_schema or "") == schema and sent.form_field == "text.format"
    assert json.loads(sent.template_kwargs or "")["reasoning_effort"] == "high"
    assert made["metadata"] == {"k": "v"} and made["text"]["format"]["schema"] == schema
    assert made["instructions"] == "Be brief." and made["max_output_tokens"] == 7


async def test_logprobs_come_with_the_text(s: Stack) -> None:
    events = await streamed(s, top_logprobs=1, include=["message.output_text.logprobs"])
    deltas = [e for e in events if e["type"] == "response.output_text.delta"]
    assert all(len(e["logprobs"]) == 1 and len(e["logprobs"][0]["top_logprobs"]) == 1 for e in deltas)
    [message] = events[-1]["response"]["output"]
    assert len(message["content"][0]["logprobs"]) == len(deltas)


async def test_a_stream_that_breaks_off_ends_with_a_failed_response(s: Stack) -> None:
    for worker in s.workers:
        worker.token_s = 0.05
    async with s.http.post(f"{s.url}/v1/responses", json=body(stream=True, max_output_tokens=500)) as r:
        await r.content.readuntil(b"output_text.delta")
        for worker in s.workers:
            await worker.kill()
        text = (await r.read()).decode()
    last = json.loads(text.rstrip().split("data: ")[-1])
    EVENT.validate_python(last)
    assert last["type"] == "response.failed" and last["response"]["error"]["code"] == "server_error"


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type"),
        ({"tools": [{"type": "custom", "name": "x"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"background": True, "stream": True}, "background"),
        ({"background": True, "store": False}, "background"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
         "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
         "input[0].content[0].type"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
        ({"previous_response_id": "resp_" + "0" * 32}, "previous_response_id"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"temperature": 3}, "temperature"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"reasoning": {"effort": "great"}}, "reasoning.effort"),
        ({"include": ["everything"]}, "include[0]"),
        ({"metadata": {"a": "b" * 600}}, "metadata"),
        ({"unknown": 1}, "unknown"),
        ({"min_p": 2}, "min_p"),
        ({"input": "x" * 5000}, "input"),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_refused_by_name(s: Stack, wrong: dict[str, Any], param: str) -> None:
    status, answer, _ = await s.post("/v1/responses", body(**wrong))
    assert status == 400 and answer["error"]["param"] == param, answer
    assert set(answer["error"]) == {"message", "type", "param", "code"}


async def test_no_previous_response_is_none(s: Stack) -> None:
    for nothing in (None, ""):
        await ask(s, previous_response_id=nothing)


async def test_an_unknown_model_is_a_404(s: Stack) -> None:
    status, answer, _ = await s.post("/v1/responses", body(model="nobody"))
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


# ---- sessions --------------------------------------------------------------------------------------------------------
async def test_the_conversation_is_recognised_with_and_without_an_id(s: Stack) -> None:
    _, first, headers = await s.post("/v1/responses", body())
    session = headers["X-Session-Id"]
    again = [{"role": "user", "content": "hello"}, *first["output"], {"role": "user", "content": "more"}]
    _, _, headers = await s.post("/v1/responses", body(input=again, store=False))
    assert headers["X-Session-Id"] == session
    _, second, headers = await s.post("/v1/responses", body(input="more", previous_response_id=first["id"]))
    assert headers["X-Session-Id"] == session and second["previous_response_id"] == first["id"]
    said = first["output"][0]["content"][0]["text"]
    assert s.workers[0].submitted[-1].messages == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "more"},
    ]
    _, _, headers = await s.post("/v1/responses", body(), headers={"X-Session-Id": "mine"})
    assert headers["X-Session-Id"] == "mine"


async def test_instructions_are_not_carried_over(s: Stack) -> None:
    first = await ask(s, instructions="Be a cat.")
    await ask(s, instructions="Be a dog.", previous_response_id=first["id"])
    assert [m["role"] for m in s.workers[0].submitted[-1].messages] == ["system", "user", "assistant", "user"]
    assert s.workers[0].submitted[-1].messages[0]["content"] == "Be a dog."


async def test_a_hint_may_name_a_response(s: Stack) -> None:
    for stored in (True, False):
        _, made, _ = await s.post("/v1/responses", body(store=stored), headers={"X-Session-Id": f"chat-{stored}"})
        status, answer, _ = await s.post("/v1/advisory", {"session_id": made["id"]})
        assert status == 202 and answer["session_id"] == made["id"]
        await s.post("/v1/invalidate", {"session_id": made["id"]})
    await until(lambda: len(s.scheduler.invalidated) == 2)
    for told in (s.scheduler.advised, s.scheduler.invalidated):
        assert [one.session.session_id for one in told] == ["chat-True", "chat-False"]


# ---- stored responses ------------------------------------------------------------------------------------------------
async def test_a_stored_response_is_read_and_deleted(s: Stack) -> None:
    made = await ask(
        s,
        input=[
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {"role": "user", "content": "c"},
        ],
    )
    status, read = await s.get(f"/v1/responses/{made['id']}")
    assert status == 200 and read == made
    status, items = await s.get(f"/v1/responses/{made['id']}/input_items?order=asc&limit=3")
    assert status == 200, items
    ResponseItemList.model_validate(items)
    assert [i["type"] for i in items["data"]] == ["message", "message", "reasoning"] and items["has_more"]
    _, rest = await s.get(f"/v1/responses/{made['id']}/input_items?order=asc&after={items['last_id']}")
    assert [i["content"][0]["text"] for i in rest["data"]] == ["c"] and not rest["has_more"]
    async with s.http.delete(f"{s.url}/v1/responses/{made['id']}") as r:
        assert r.status == 200 and await r.json() == {"id": made["id"], "object": "response", "deleted": True}
    for path in (f"/v1/responses/{made['id']}", f"/v1/responses/{made['id']}/input_items", "/v1/responses/resp_x"):
        status, answer = await s.get(path)
        assert status == 404 and "not found" in answer["error"]["message"]
    status, answer, _ = await s.post("/v1/responses", body(previous_response_id=made["id"]))
    assert (status, answer["error"]["code"]) == (400, "previous_response_not_found")


async def test_what_is_not_to_be_stored_is_not(s: Stack) -> None:
    made = await ask(s, store=False)
    assert made["store"] is False
    assert (await s.get(f"/v1/responses/{made['id']}"))[0] == 404


async def test_items_are_named_by_their_ids(s: Stack) -> None:
    made = await ask(s)
    reference = {"type": "item_reference", "id": made["output"][0]["id"]}
    await ask(s, input=[{"role": "user", "content": "hello"}, reference, {"role": "user", "content": "x"}])
    said = made["output"][0]["content"][0]["text"]
    assert [m["content"] for m in s.workers[0].submitted[-1].messages] == ["hello", said, "x"]


async def test_a_conversation_without_its_middle_is_refused(s: Stack) -> None:
    first = await ask(s)
    second = await ask(s, previous_response_id=first["id"])
    await s.http.delete(f"{s.url}/v1/responses/{first['id']}")
    status, answer, _ = await s.post("/v1/responses", body(previous_response_id=second["id"]))
    assert status == 400 and answer["error"]["param"] == "previous_response_id", answer


async def test_erasing_a_session_deletes_its_responses(s: Stack) -> None:
    _, made, _ = await s.post("/v1/responses", body(), headers={"X-Session-Id": "chat-1"})
    async with s.http.delete(f"{s.url}/v1/sessions/chat-1") as r:
        assert r.status == 200
    assert (await s.get(f"/v1/responses/{made['id']}"))[0] == 404


# ---- background ------------------------------------------------------------------------------------------------------
async def test_a_response_in_the_background_is_read_later(s: Stack) -> None:
    made = await ask(s, background=True)
    assert made["status"] == "queued" and made["output"] == []

    async def ended() -> bool:
        return (await s.get(f"/v1/responses/{made['id']}"))[1]["status"] not in ("queued", "in_progress")

    await until(ended)
    read = (await s.get(f"/v1/responses/{made['id']}"))[1]
    Response.model_validate(read)
    assert read["status"] == "incomplete" and read["output"][0]["content"][0]["text"]
    await ask(s, previous_response_id=made["id"])


async def test_a_response_in_the_background_is_cancelled(s: Stack) -> None:
    for worker in s.workers:
        worker.token_s = 0.2
    made = await ask(s, background=True, max_output_tokens=200)
    await asyncio.wait_for(s.workers[0].seen_submit.wait(), 5)
    status, answer, _ = await s.post(f"/v1/responses/{made['id']}/cancel", {})
    assert (status, answer["status"]) == (200, "cancelled")
    await asyncio.wait_for(s.workers[0].seen_cancel.wait(), 5)
    assert (await s.get(f"/v1/responses/{made['id']}"))[1]["status"] == "cancelled"
    assert (await s.post("/v1/responses", body(previous_response_id=made["id"])))[0] == 400
    whole = await ask(s, max_output_tokens=1)
    assert (await s.post(f"/v1/responses/{whole['id']}/cancel", {}))[0] == 400


async def test_a_failure_in_the_background_is_told(s: Stack) -> None:
    made = await ask(s, background=True, input="x" * 5000)

    async def failed() -> bool:
        return (await s.get(f"/v1/responses/{made['id']}"))[1]["status"] == "failed"

    await until(failed)
    error = (await s.get(f"/v1/responses/{made['id']}"))[1]["error"]
    assert error == {"code": "invalid_prompt", "message": "the prompt is too long"}


async def test_openais_client_reads_it_all(s: Stack) -> None:
    async with openai.AsyncOpenAI(base_url=f"{s.url}/v1", api_key="x", max_retries=0) as client:
        made = await client.responses.create(model=MODEL, input="hi")
        assert made.output_text and made.usage is not None
        tools: Any = [TOOL]
        async with client.responses.stream(
            model=MODEL, input="hi", previous_response_id=made.id, tools=tools, tool_choice="required"
        ) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_response()
        assert final.previous_response_id == made.id
        assert (await client.responses.retrieve(made.id)).output_text == made.output_text
        items = await client.responses.input_items.list(made.id)
        assert [i.type for i in items.data] == ["message"]
        await client.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made.id)


# ---- what may not hurt others ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", sorted(IGNORED - {"metadata", "store"}))
async def test_a_field_without_effect_is_ignored(s: Stack, name: str) -> None:
    await ask(s, **{name: "auto" if name == "truncation" else {}})


async def test_references_count_as_often_as_they_are_made(s: Stack) -> None:
    first = await ask(s, input="x" * 1000)
    _, items = await s.get(f"/v1/responses/{first['id']}/input_items")
    reference = {"type": "item_reference", "id": items["data"][0]["id"]}
    status, said, _ = await s.post("/v1/responses", body(input=[reference] * 16_000))
    assert (status, said["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_number_of_more_than_64_bits_ends_no_helper(s: Stack) -> None:
    tool = TOOL | {"parameters": {"type": "object", "properties": {"n": {"type": "integer", "maximum": 2**64}}}}
    spaced = json.dumps(body(tools=[tool])) + " " * 400_000  # so long that a helper decodes it
    async with s.http.post(f"{s.url}/v1/responses", data=spaced, headers={"Content-Type": "application/json"}) as r:
        made = await r.json()
    assert made["tools"][0]["parameters"]["properties"]["n"]["maximum"] == 2**64


async def test_a_limit_of_many_digits_is_refused(s: Stack) -> None:
    made = await ask(s)
    status, said = await s.get(f"/v1/responses/{made['id']}/input_items?limit={'1' * 5000}")
    assert (status, said["error"]["param"]) == (400, "limit")


async def test_a_stream_that_could_not_be_stored_says_so(s: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*_: object) -> bool:
        return False

    monkeypatch.setattr(Keeper, "put", full)
    assert (await ask(s))["store"] is False
    assert (await streamed(s))[-1]["response"]["store"] is False
