"""Whatever is sent, the answer is OpenAI's envelope naming the field, and the service is unharmed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from gateway_fakes import MODEL, Stack, stack
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.errors import InvalidRequest
from contracts.frames import Commands, encode_submit, together
from contracts.request import GenerateRequest
from gateway.openai.parameters import validate
from gateway.openai.requests import ChatRequest

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
JSON = {"Content-Type": "application/json"}
#: Of requests that are written by hand.
HEAD = "Host: 127.0.0.1\r\nContent-Type: application/json\r\n"


@pytest.fixture
async def s() -> Any:
    async with stack(1) as running:
        yield running
        running.workers[0].submitted.clear()
        status, _, _ = await running.chat()
        assert status == 200, "the service is harmed"


def envelope(body: Any) -> dict[str, Any]:
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return dict(body["error"])


def chat(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **more}


TOOL = {"type": "function", "function": {"name": "a"}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "a", "arguments": "{}"}}
DEEP: dict[str, Any] = {}
for _ in range(100):
    DEEP = {"items": DEEP}

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"temperature": "warm"}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": 5}, "stop"),
    ({"seed": "x"}, "seed"),
    ({"seed": 2**70}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 9}, "n"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": None, "logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"usage": True}}, "stream_options.usage"),
    ({"priority": 1.5}, "priority"),
    ({"session_id": "../../etc/passwd"}, "session_id"),
    ({"session_id": "a\0b"}, "session_id"),
    ({"session_id": ""}, "session_id"),
    ({"session_id": 5}, "session_id"),
    ({"model": 5}, "model"),
    ({"model": None}, "model"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    (
        {"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[1].content[0].type",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].id"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}]},
        "messages[0].tool_calls[0].type",
    ),
    ({"messages": [{"role": "tool", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, "messages[0].colour"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    (
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}]},
        "tools[0].function.parameters",
    ),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "custom", "custom": {"name": "a"}}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": 5}}}, "tool_choice.function.name"),
    ({"tools": [TOOL], "min_tokens": 3}, "min_tokens"),
    ({"functions": [{}]}, "functions"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": DEEP}}},
        "response_format.json_schema.schema",
    ),
    ({"response_format": {"type": "json_object"}, "min_tokens": 3}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty"),
    ({"best_of": 2}, "best_of"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"frobnicate": 1}, "frobnicate"),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_wrong_or_unknown_field_is_named(s: Stack, stream: bool) -> None:
    for wrong, param in WRONG:
        status, body, _ = await s.post(CHAT, chat(**{"stream": stream, **wrong}))
        assert (status, envelope(body)["param"]) == (400, param), (wrong, body)
        assert body["error"]["type"] == "invalid_request_error"
    assert not s.workers[0].submitted


async def test_a_missing_field_is_named(s: Stack) -> None:
    for path, body, param in (
        (CHAT, {"messages": []}, "model"),
        (CHAT, {"model": MODEL}, "messages"),
        (PLAIN, {"model": MODEL}, "prompt"),
    ):
        status, answer, _ = await s.post(path, body)
        assert (status, envelope(answer)["param"], answer["error"]["code"]) == (
            400,
            param,
            "missing_required_parameter",
        )


async def test_completions_refuse_what_they_do_not_do_by_name(s: Stack) -> None:
    for wrong, param in (
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": ["a", {}]}, "prompt[1]"),
        ({"prompt": ["a"] * 32, "n": 8}, "n"),
        ({"messages": []}, "messages"),
    ):
        status, body, _ = await s.post(PLAIN, {"model": MODEL, "prompt": "x", **wrong})
        assert (status, envelope(body)["param"]) == (400, param), (wrong, body)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b"\xff\xfe\x00",
        b"null",
        b"[]",
        b'"x"',
        b'{"model": NaN}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
    ids=["empty", "open", "text", "binary", "null", "list", "string", "nan", "deep list", "deep object"],
)
@pytest.mark.parametrize("path", [CHAT, PLAIN, "/v1/advisory", "/v1/invalidate"])
async def test_what_is_no_json_object_is_a_400(s: Stack, path: str, body: bytes) -> None:
    async with s.http.post(s.url + path, data=body, headers={"Content-Type": "application/json"}) as r:
        assert r.status == 400
        envelope(await r.json())


async def test_an_unknown_model_is_a_404_naming_it(s: Stack) -> None:
    for name in ("gpt-none", "x" * 500, "a\0b", "../../models"):
        status, body, _ = await s.post(CHAT, chat(model=name))
        assert status == 404 and (envelope(body)["param"], body["error"]["code"]) == ("model", "model_not_found")
    status, body = await s.get("/v1/models/gpt-none")
    assert status == 404 and envelope(body)["code"] == "model_not_found"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_over_long_prompt_is_refused_before_any_header(s: Stack, stream: bool) -> None:
    status, body, _ = await s.chat("x" * 5000, stream=stream)
    assert status == 400
    assert (envelope(body)["param"], body["error"]["code"]) == ("messages", "context_length_exceeded")


@pytest.mark.parametrize("bad", ["..%2F..%2Fetc", "a%00b", "%2e%2e", "a%20b", "x" * 129])
async def test_a_bad_session_id_in_a_path_is_named(s: Stack, bad: str) -> None:
    from yarl import URL

    for method in ("GET", "DELETE"):
        async with s.http.request(method, URL(f"{s.url}/v1/sessions/{bad}", encoded=True)) as r:
            body = await r.json()
        assert r.status in (400, 404) and envelope(body)["code"] in ("invalid_session_id", "unknown_url")
    assert not s.scheduler.erased


async def test_a_bad_session_header_is_named(s: Stack) -> None:
    for header in ("X-Session-Id", "X-OpenWebUI-Chat-Id", "X-Conversation-Id"):
        status, body, _ = await s.chat(headers={header: "../x"})
        assert (status, envelope(body)["param"]) == (400, header)


async def test_an_unknown_node_is_refused_naming_the_header(s: Stack) -> None:
    for path, body in ((CHAT, chat()), ("/v1/advisory", {"session_id": "a"})):
        status, answer, _ = await s.post(path, body, headers={"X-Upbeat-Node": "node-77"})
        assert (status, envelope(answer)["param"]) == (400, "X-Upbeat-Node")


async def test_unknown_routes_and_methods_answer_in_the_envelope(s: Stack) -> None:
    for method, path, status in (
        ("GET", "/v1/nothing", 404),
        ("POST", "/", 405),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
    ):
        async with s.http.request(method, s.url + path) as r:
            assert r.status == status
            envelope(await r.json())


async def test_a_hundred_megabytes_are_refused_by_their_length_before_they_are_sent(s: Stack) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", s.config.gateway.port)
    writer.write(f"POST {CHAT} HTTP/1.1\r\n{HEAD}Content-Length: {100 << 20}\r\n\r\n".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413 ")
    writer.close()


async def test_a_client_that_asks_first_is_told_413_instead_of_continue(s: Stack) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", s.config.gateway.port)
    writer.write(f"POST {CHAT} HTTP/1.1\r\n{HEAD}Expect: 100-continue\r\nContent-Length: {100 << 20}\r\n\r\n".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413 ")
    writer.close()


@pytest.mark.parametrize("path", [CHAT, "/v1/advisory"])
async def test_a_hundred_megabytes_sent_all_the_same_are_a_413(s: Stack, path: str) -> None:
    async with s.http.post(s.url + path, data=b"x" * (100 << 20), headers=JSON) as r:
        assert r.status == 413
        assert envelope(await r.json())["code"] == "body_too_large"


async def test_a_chunked_body_is_cut_off_at_the_limit(s: Stack) -> None:
    sent = 0

    async def endless() -> Any:
        nonlocal sent
        while True:
            sent += 1 << 20
            yield b" " * (1 << 20)

    try:
        async with s.http.post(s.url + CHAT, data=endless(), headers=JSON) as r:
            assert r.status == 413
            assert envelope(await r.json())["code"] == "body_too_large"
    except aiohttp.ClientError:
        pass  # the connection was closed under the sender: as good
    assert sent < 10 << 30


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd"])
async def test_a_compressed_body_is_refused_unopened(s: Stack, encoding: str) -> None:
    headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
    async with s.http.post(s.url + CHAT, data=b"x" * 1000, headers=headers) as r:
        assert (r.status, envelope(await r.json())["param"]) == (400, "Content-Encoding")


async def test_a_message_list_without_end_is_refused(s: Stack) -> None:
    for messages in ([1] * 1_000_000, [{"role": "user", "content": ""}] * 100_000):
        status, body, _ = await s.post(CHAT, chat(messages=messages))
        assert status == 400 and envelope(body)["param"].startswith("messages")


async def test_a_broken_request_line_is_no_harm(s: Stack) -> None:
    for raw in (b"GARBAGE\r\n\r\n", b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x00"):
        reader, writer = await asyncio.open_connection("127.0.0.1", s.config.gateway.port)
        writer.write(raw)
        writer.write_eof()
        async with asyncio.timeout(5):
            answer = await reader.read()
        assert not answer or answer.startswith(b"HTTP/1.1 4")
        assert b"Traceback" not in answer
        writer.close()


async def test_the_gateway_never_shows_a_traceback(s: Stack) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("secret detail")

    assert s.gateway.parts is not None
    s.gateway.parts.limits.take = broken  # type: ignore[method-assign]
    status, body, _ = await s.post("/v1/advisory", {"session_id": "a"})
    assert status == 500 and envelope(body)["code"] == "internal_error"
    assert "secret" not in json.dumps(body)


FORMS = ["structured_outputs", "guided_json", "guided_regex", "guided_choice"]
KEYS = (
    "type function name parameters description json_schema schema strict id arguments role content tool_calls "
    "tool_call_id properties x"
)
VLLM_KEYS = "json regex choice"
words = st.text(max_size=6) | st.sampled_from(["function", "f", "object", "\ud800"])
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | words,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*KEYS.split(), *VLLM_KEYS.split()]), inner, max_size=5)
    ),
    max_leaves=12,
)


@given(
    st.sampled_from(["tools", "tool_choice", "response_format", "messages", "parallel_tool_calls", *FORMS]),
    json_values,
    st.booleans(),
)
@settings(max_examples=600, deadline=None)
def test_whatever_describes_tools_and_formats_is_taken_or_refused_by_name(
    field: str, value: Any, wrapped: bool
) -> None:
    refused: InvalidRequest | None = None
    try:
        wanted = validate(ChatRequest, chat(tools=[TOOL]) | {field: [value] if wrapped else value})
    except InvalidRequest as e:
        refused = e
    if refused is not None:
        assert refused.message.encode()
        assert refused.param and refused.param.split(".")[0].split("[")[0] in (field, "tool_choice"), refused.param
        return
    sent = GenerateRequest("r", "t", "s", "m", wanted.sampling(), [m.plain() for m in wanted.messages])
    sent.tool_use = wanted.tool_use
    if (form := wanted.form) is not None:
        sent.json_schema, sent.regex, sent.form_field = form.json_schema, form.regex, form.field
    assert Commands().take(together([encode_submit(sent)])) == [sent]
