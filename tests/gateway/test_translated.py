"""`/v1/responses` and `/v1/messages` over engines with HTTP of their own: relayed as chats, and translated back."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from fake_sidecar import CACHED_TOKENS, PROMPT_TOKENS, HttpStack, as_at_first, head_of, http_stack
from gateway_fakes import MODEL, until
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from gateway.routes.translated import _TranslatedRun

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
OPENAI: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ANTHROPIC: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
USER = {"role": "user", "content": "hi"}
BODIES: dict[str, dict[str, Any]] = {
    RESPONSES: {"model": MODEL, "input": "hi"},
    MESSAGES: {"model": MODEL, "messages": [USER], "max_tokens": 9, "thinking": {"type": "adaptive"}},
}


@pytest.fixture(scope="module")
async def shared() -> AsyncIterator[HttpStack]:
    async with http_stack() as running:
        yield running


@pytest.fixture
def s(shared: HttpStack) -> HttpStack:
    return as_at_first(shared)


async def events(s: HttpStack, path: str, **more: Any) -> list[dict[str, Any]]:
    status, answer, headers = await s.raw(path, BODIES[path] | {"stream": True} | more)
    assert status == 200 and headers["Content-Type"].startswith("text/event-stream"), answer
    found = [json.loads(part.split("data: ", 1)[1]) for part in answer.decode().split("\n\n") if "data: " in part]
    for event in found:
        (OPENAI if path == RESPONSES else ANTHROPIC).validate_python(event)
    return found


async def whole(s: HttpStack, path: str, **more: Any) -> dict[str, Any]:
    status, answer, _ = await s.raw(path, BODIES[path] | more)
    assert status == 200, answer
    made: dict[str, Any] = json.loads(answer)
    (Response if path == RESPONSES else Message).model_validate(made, strict=True)
    return made


async def test_a_response_is_a_chat_and_its_answer(s: HttpStack) -> None:
    s.sidecars[0].call = ("look", '{"a": [1]}')
    made = await whole(s, RESPONSES, instructions="be kind", odd={"deep": 1}, min_p=0.5, store=True)
    (heard,) = s.heard
    assert heard.head.path == "/v1/chat/completions"
    assert heard.body["messages"] == [{"role": "system", "content": "be kind"}, USER]
    assert heard.body["odd"] == {"deep": 1} and heard.body["min_p"] == 0.5, "the engine may know what we do not"
    reasoning, message, call = made["output"]
    assert reasoning["content"][0]["text"] == "hm" and message["content"][0]["text"] == "Hello my friend"
    assert (call["name"], call["arguments"]) == ("look", '{"a": [1]}') and made["status"] == "completed"
    assert made["usage"]["input_tokens"] == PROMPT_TOKENS
    assert made["usage"]["input_tokens_details"]["cached_tokens"] == CACHED_TOKENS
    streamed = await events(s, RESPONSES, instructions="be kind")
    assert [event["sequence_number"] for event in streamed] == list(range(len(streamed)))
    assert s.heard[1].body["stream_options"]["include_usage"] is True
    last = streamed[-1]["response"]
    assert [item["type"] for item in last["output"]] == ["reasoning", "message", "function_call"]
    assert last["usage"] == made["usage"]


async def test_a_message_is_a_chat_and_its_answer(s: HttpStack) -> None:
    s.sidecars[0].call = ("look", '{"a": [1]}')
    made = await whole(s, MESSAGES)
    assert made["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": "unsigned"},
        {"type": "text", "text": "Hello my friend"},
        {"type": "tool_use", "id": "c1", "name": "look", "input": {"a": [1]}},
    ]
    assert made["stop_reason"] == "tool_use" and made["usage"]["cache_read_input_tokens"] == CACHED_TOKENS
    streamed = await events(s, MESSAGES)
    parts = [e["delta"]["partial_json"] for e in streamed if e.get("delta", {}).get("type") == "input_json_delta"]
    assert "".join(parts) == '{"a": [1]}' and streamed[-2]["usage"] == made["usage"]
    assert streamed[0]["type"] == "message_start" and streamed[-1]["type"] == "message_stop"
    await whole(s, MESSAGES, thinking=None, system="be kind", temperature=0.5)
    sent = s.heard[-1].body
    assert sent["chat_template_kwargs"] == {"enable_thinking": False, "thinking": False}
    assert sent["messages"][0] == {"role": "system", "content": "be kind"} and sent["max_completion_tokens"] == 9


async def test_images_pass_to_an_engine_that_may_read_them(s: HttpStack) -> None:
    parts = [{"type": "input_text", "text": "What?"}, {"type": "input_image", "image_url": "data:image/png;base64,AA"}]
    await whole(s, RESPONSES, input=[{"role": "user", "content": parts}])
    source = {"type": "base64", "media_type": "image/png", "data": "AA"}
    blocks = [{"type": "text", "text": "What?"}, {"type": "image", "source": source}]
    await whole(s, MESSAGES, messages=[{"role": "user", "content": blocks}])
    for heard in s.heard:
        text, image = heard.body["messages"][0]["content"]
        assert text == {"type": "text", "text": "What?"} and image["image_url"]["url"] == "data:image/png;base64,AA"


@pytest.mark.parametrize("path", BODIES)
async def test_a_conversation_stays_in_its_session(s: HttpStack, path: str) -> None:
    s.sidecars[0].call = ("look", '{"b":1,"a":[2]}')
    opening = {"role": "user", "content": f"{path}: tell me a story"}
    field = "input" if path == RESPONSES else "messages"

    async def ask(*turns: dict[str, Any]) -> tuple[Any, str]:
        _, answer, headers = await s.raw(path, BODIES[path] | {field: list(turns)})
        return json.loads(answer), headers["X-Session-Id"]

    made, first = await ask(opening)
    again = (await ask(opening))[1]
    back = made["output"] if path == RESPONSES else [{"role": "assistant", "content": made["content"]}]
    second = (await ask(opening, *back, {"role": "user", "content": "go on"}))[1]
    assert first.startswith("imp-") and again != first and second == again, "the last one that answered so"


async def test_a_stored_response_is_gone_on_with_on_another_node(s: HttpStack) -> None:
    first = await whole(s, RESPONSES)
    status, answer, headers = await s.raw(
        RESPONSES, BODIES[RESPONSES] | {"input": "more", "previous_response_id": first["id"]}, X_Upbeat_Node="node-1"
    )
    assert status == 200 and headers["X-Upbeat-Node"] == "node-1", answer
    assert [m["content"] for m in s.sidecars[1].heard[0].body["messages"]] == ["hi", "Hello my friend", "more"]


async def test_a_response_in_the_background_is_read_later(s: HttpStack) -> None:
    made = await whole(s, RESPONSES, background=True)
    assert made["status"] == "queued"

    async def ended() -> bool:
        async with s.http.get(f"{s.url}{RESPONSES}/{made['id']}") as r:
            return (await r.json())["status"] == "completed"

    await until(ended)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("status", [400, 404, 422, 500, 503])
async def test_an_engines_error_is_told_in_the_callers_form(s: HttpStack, path: str, status: int) -> None:
    said = b'{"error": {"message": "no", "type": "BadRequest", "param": "top_p", "code": %d}}' % status
    s.sidecars[0].answers = head_of("application/json", status), [said]
    got, answer, _ = await s.raw(path, BODIES[path])
    error = json.loads(answer)
    assert got == {422: 400, 500: 503}.get(status, status) and error["error"]["message"] == "no"
    assert error.get("type") == ("error" if path == MESSAGES else None)
    assert error["error"]["param"] == ("top_p" if status < 500 else None)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("odd", [b"{", b"[]", b'{"choices": 5}', b'{"choices": [{"message": {"tool_calls": [{}]}}]}'])
async def test_an_answer_that_cannot_be_read_is_a_503_or_an_empty_one(s: HttpStack, path: str, odd: bytes) -> None:
    s.sidecars[0].answers = head_of("application/json"), [odd]
    assert (await s.raw(path, BODIES[path]))[0] in (200, 503)
    s.sidecars[0].answers = head_of("text/event-stream"), [b"data: " + odd + b"\n\n", b"data: [DONE]\n\n"]
    status, answer, _ = await s.raw(path, BODIES[path] | {"stream": True})
    assert status == 200 and answer.endswith(b"\n\n")


async def test_a_large_answer_is_translated_beside_the_loop(s: HttpStack, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, translate = [], _TranslatedRun._translated

    def watched(run: _TranslatedRun, body: bytes) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return translate(run, body)

    monkeypatch.setattr(_TranslatedRun, "_translated", watched)
    await whole(s, RESPONSES)
    token = {"token": "a", "logprob": -1.0, "bytes": [97]}
    tokens = [token | {"top_logprobs": [token] * 20}] * 2000
    choice = {"index": 0, "message": {"role": "assistant", "content": "a" * 2000}, "finish_reason": "stop"}
    answer = json.dumps({"choices": [choice | {"logprobs": {"content": tokens}}]}).encode()
    s.sidecars[0].answers = (
        head_of("application/json"),
        [answer[at : at + 65536] for at in range(0, len(answer), 65536)],
    )
    made = await whole(s, RESPONSES, top_logprobs=20, include=["message.output_text.logprobs"])
    assert len(made["output"][0]["content"][0]["logprobs"]) == 2000
    assert threads[0] is threading.main_thread() is not threads[1]


@pytest.mark.parametrize("path", BODIES)
async def test_an_error_within_a_stream_ends_it(s: HttpStack, path: str) -> None:
    pieces = [b'data: {"choices": [{"index": 0, "delta": {"content": "a"}}]}\n\n',
              b'data: {"error": {"message": "gone", "code": 500}}\n\n', b"data: [DONE]\n\n"]  # fmt: skip
    s.sidecars[0].answers = head_of("text/event-stream"), pieces
    _, answer, _ = await s.raw(path, BODIES[path] | {"stream": True})
    last = json.loads(answer.decode().rstrip().rpartition("data: ")[2])
    assert last["type"] == ("response.failed" if path == RESPONSES else "error") and "gone" in str(last)


async def test_thoughts_in_the_text_are_split_off(s: HttpStack) -> None:
    text = "<think>\nhm\n</think>\n\nso"
    made = {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]}
    s.sidecars[0].answers = head_of("application/json"), [json.dumps(made).encode()]
    output = (await whole(s, RESPONSES))["output"]
    assert [item["type"] for item in output] == ["reasoning", "message"] and output[1]["content"][0]["text"] == "so"
    hidden = await whole(s, MESSAGES, thinking=None)
    assert hidden["content"] == [{"type": "text", "text": "so"}]


async def test_the_stop_sequence_is_named(s: HttpStack) -> None:
    choice = {"index": 0, "message": {"content": "a"}, "finish_reason": "stop", "stop_reason": "END"}
    s.sidecars[0].answers = head_of("application/json"), [json.dumps({"choices": [choice]}).encode()]
    made = await whole(s, MESSAGES, stop_sequences=["END"])
    assert s.heard[0].body["stop"] == ["END"]
    assert (made["stop_reason"], made["stop_sequence"]) == ("stop_sequence", "END")


async def test_tokens_are_counted_by_the_engine(s: HttpStack) -> None:
    status, answer, headers = await s.raw("/v1/messages/count_tokens", BODIES[MESSAGES] | {"system": "be kind"})
    assert (status, json.loads(answer)) == (200, {"input_tokens": 3}) and headers["X-Upbeat-Node"] == "node-0"
    assert s.heard[0].head.path == "/tokenize" and len(s.heard[0].body["messages"]) == 2
    assert "max_tokens" not in s.heard[0].body
    s.sidecars[0].answers = head_of("application/json", 400), [b'{"error": {"message": "no"}}']
    status, answer, _ = await s.raw("/v1/messages/count_tokens", BODIES[MESSAGES])
    assert status == 400 and json.loads(answer)["type"] == "error"
