"""Hostile requests for every route: a right body with wrong, extreme or odd values in any of its fields.

The fields come from the schemas that check requests, so that a new field is attacked from its first day. Everything
else is listed here.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import requests
import schemathesis
from hypothesis import strategies as st
from schemathesis import GenerationMode

from gateway.anthropic.requests import REFUSED as MESSAGES_REFUSED
from gateway.anthropic.requests import MessageRequest
from gateway.core.relay_bodies import TAKEN_OUT
from gateway.core.spellings import FIELDS, FINAL, HEADERS, PRIORITY, THREADS
from gateway.core.uploads import PURPOSE
from gateway.finetune.requests import Hyperparameters, JobRequest
from gateway.openai.description import openapi
from gateway.openai.parameters import HARMLESS, REFUSED
from gateway.openai.requests import ChatRequest, CompletionRequest
from gateway.openai.token_requests import REFUSED as TOKENS_REFUSED
from gateway.openai.token_requests import Detokenize, TokenizeMessages, TokenizePrompt
from gateway.responses.requests import EXTRAS, ResponseRequest
from gateway.responses.requests import REFUSED as RESPONSES_REFUSED
from tests.attack.world import NAME

JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class Case:
    """One request. long: its answer may take any time, so the attacker hangs up after a moment."""

    method: str
    path: str
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None
    long: bool = False


# ---- values ----------------------------------------------------------------------------------------------------------
NUMBERS: list[Any] = [0, -0.0, 1, -1, 2, 0.5, 1e-300, 5e-324, 1e-45, 1e-38, 1e-6, 0.999999999, 1e38, 3.5e38, 1e308,
-1e308, float("nan"),
                      float("inf"), -float("inf"), 255, 256, 4096, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63,
                      -(2**63) - 1,
                      2**64, 10**40]  # fmt: skip
TEXTS = ["", " ", "a", "\0", "\ud800", "é" * 300, "\U0001f600" * 50, "\u202e", "﷽" * 20, "<|im_end|>", "{{ 1 }}",
"../../etc/passwd", "%00",
         "x" * 5000, "\n" * 2000, "a\r\nX-Session-Id: b", "null", "-1", "1e999", "ек_тест", "adv-0", "Z" * 129,
         "imp-" + "0" * 32]  # fmt: skip
DEEP: list[Any] = [
    json.loads("[" * 60 + "]" * 60),
    json.loads('{"a":' * 60 + "1" + "}" * 60),
    [[]] * 200,
    {str(i): i for i in range(300)},
]
ODD: list[Any] = [None, True, False, [], {}, [None], [[]], {"": ""}, {"type": "object"}, {"type": "text"}]
VALUES = st.one_of(
    st.sampled_from([*NUMBERS, *TEXTS, *DEEP, *ODD]),
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
        max_leaves=8,
    ),
)
#: Of the legal range, its ends and what is near them: these reach the engine.
LEGAL: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0, 5e-324, 1e-300, 1e-38, 1e-6, 1.0, 2, 1.9999999]) | st.floats(0, 2),
    "top_p": st.sampled_from([0, 5e-324, 1e-300, 1e-9, 0.5, 1]) | st.floats(0, 1),
    "top_k": st.sampled_from([-1, 0, 1, 2, 2559, 2560, 2561, 1 << 30]),
    "min_p": st.sampled_from([0, 5e-324, 1e-300, 1e-9, 1]) | st.floats(0, 1),
    "seed": st.integers(-(1 << 63), (1 << 63) - 1),
    "presence_penalty": st.sampled_from([-2, 2, 5e-324]) | st.floats(-2, 2),
    "frequency_penalty": st.sampled_from([-2, 2, 1e-300]) | st.floats(-2, 2),
    "repetition_penalty": st.sampled_from([5e-324, 1e-300, 1e-45, 1e-38, 1e-6, 1e-3, 1, 10]) | st.floats(0, 10),
    "min_tokens": st.integers(0, 4),
    "max_tokens": st.integers(1, 4),
    "stop": st.lists(st.text(min_size=1, max_size=1024), min_size=1, max_size=16) | st.text(min_size=1, max_size=8),
    "stop_token_ids": st.lists(st.integers(0, 2050), max_size=64),
    "logit_bias": st.dictionaries(
        st.integers(0, 2050).map(str), st.sampled_from([-100, 100, 0.5, -1e-300]), max_size=4096
    ),
    "n": st.integers(1, 8),
    "ignore_eos": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "stream": st.booleans(),
    "priority": st.integers(-1000, 1000),
    "logprobs": st.sampled_from([True, False, 0, 20]),
    "top_logprobs": st.integers(0, 20),
    "tokens": st.lists(st.integers(0, 2050), max_size=300),
    "prompt": st.lists(st.integers(0, 2050), min_size=1, max_size=300) | st.text(min_size=1, max_size=500),
}
SCHEMAS: list[Any] = [
    {}, {"type": "object"}, {"enum": list(range(500))}, {"type": "string", "pattern": "^(a+)+$"}, {"type": "string",
    "pattern": "(?=a)b"},
    {"type": "string", "minLength": 5, "maxLength": 4}, {"type": "array", "minItems": 10**6, "items": {"type": "null"}},
    {"type": "nonsense"},
    {"$ref": "#"}, {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, {"$ref": "http://127.0.0.1:9/x"},
    {"not": {}},
    {"const": "\ud800"},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a", "b"], "additionalProperties": False},
    {"type": "string", "pattern": "(a{1,50}){1,50}"}, {"anyOf": [{"type": "integer"}] * 100}, {"type": "number",
    "multipleOf": 1e-300},
    {"allOf": [{"type": "string", "pattern": f"[{chr(97 + i)}-z]{{3,9}}"} for i in range(6)]},
]  # fmt: skip

# ---- right bodies ----------------------------------------------------------------------------------------------------
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "d",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
    },
}
CALLED = [{"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"q": "a"}'}}]
CHAT: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 2}
TURNS: dict[str, Any] = {
    "model": NAME,
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Look."}], "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": CALLED},
        {"role": "tool", "content": "found", "tool_call_id": "call_1"},
    ],
    "max_tokens": 2,
}
WITH_TOOLS: dict[str, Any] = CHAT | {"tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": True}
WITH_FORMAT: dict[str, Any] = CHAT | {
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"},
    "strict": True}},
    "stream_options": {"include_usage": True}, "stream": True,
}  # fmt: skip
COMPLETION: dict[str, Any] = {"model": NAME, "prompt": "Hello.", "max_tokens": 2}
TOKENIZE: dict[str, Any] = {"model": NAME, "prompt": "Hello.", "return_token_strs": True}
TOKENIZE_CHAT: dict[str, Any] = {"messages": TURNS["messages"], "tools": [TOOL], "add_generation_prompt": False}
CONTINUED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hel"}],
    "add_generation_prompt": False, "continue_final_message": True, "chat_template_kwargs": {"enable_thinking": False},
}  # fmt: skip
DETOKENIZE: dict[str, Any] = {"model": NAME, "tokens": [1, 2, 300]}
ADVISORY: dict[str, Any] = {
    "session_id": "hostile",
    "model_id": NAME,
    "expected_arrival": 1.0,
    "ordered": True,
    "priority": 1,
    "ttl_s": 5.0,
}
GRAPH: dict[str, Any] = {
    "agents": ["a", "b"],
    "edges": [{"from": "a", "to": "b", "probability": 0.5, "calls": 1, "delay_s": 0.1}],
    "learn": True,
}
SECRET: dict[str, Any] = {
    "session_id": "hostile",
    "expires_after": {"anchor": "created_at", "seconds": 60},
    "origin": "https://a.example",
}
RESPONSE: dict[str, Any] = {
    "model": NAME,
    "instructions": "be brief",
    "input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}],
    "max_output_tokens": 2,
}
CALL_ITEM: dict[str, Any] = {"type": "function_call", "call_id": "c", "name": "look", "arguments": '{"q": "a"}'}
ITEMS: dict[str, Any] = RESPONSE | {
    "input": [
        {"type": "message", "role": "user", "content": "Look.", "id": "msg_1", "status": "completed"},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "a"}]},
        CALL_ITEM,
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "found"}]},
    ],
    "tools": [{"type": "function", **TOOL["function"]}],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]},
    "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}, "verbosity": "low"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["message.output_text.logprobs"],
    "metadata": {"a": "b"},
    "stream": True,
}
CONTINUED_RESPONSE: dict[str, Any] = RESPONSE | {
    "previous_response_id": "resp_" + "0" * 32,
    "store": False,
    "input": [{"type": "item_reference", "id": "msg_" + "0" * 36}],
}
BACKGROUND: dict[str, Any] = RESPONSE | {"background": True}
ANTHROPIC: dict[str, Any] = {
    "model": NAME,
    "system": [{"type": "text", "text": "be brief"}],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
    "max_tokens": 2,
}
BLOCKS: dict[str, Any] = ANTHROPIC | {
    "messages": [
        {"role": "user", "content": "Look."},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "a", "signature": "b"},
                {"type": "text", "text": "I look.", "cache_control": {"type": "ephemeral"}},
                {"type": "tool_use", "id": "c", "name": "look", "input": {"q": "a"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "found"}]},
    ],
    "tools": [{"name": "look", "description": "d", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"effort": "low"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "metadata": {"user_id": '{"session_id": "0123456789"}'},
    "stop_sequences": ["END"],
    "stream": True,
}
TUNING: dict[str, Any] = {
    "model": NAME,
    "training_file": "file-" + "0" * 32,
    "validation_file": None,
    "method": {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 1, "batch_size": "auto"}}},
    "seed": 1,
    "suffix": "hostile",
    "metadata": {"a": "b"},
}
FORMER_TUNING: dict[str, Any] = {
    "model": NAME,
    "training_file": "file-" + "f" * 32,
    "hyperparameters": dict.fromkeys(Hyperparameters.model_fields, "auto"),
}
EMBEDDING: dict[str, Any] = {"model": NAME, "input": ["a", "b"]}
HINTS: dict[str, Any] = {"kv_hints": {"version": 1, "actions": [{"type": "prefetch", "session_id": "a"}]}}


def paths(value: Any, before: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Where something can be replaced in a JSON value, itself left out."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, item in inner for path in ((*before, key), *paths(item, (*before, key)))]


def put(value: Any, path: tuple[str | int, ...], new: Any) -> Any:
    """A copy of `value` with `new` at `path`; missing objects on the way are made."""
    made = copy.deepcopy(value)
    at = made
    for key in path[:-1]:
        if isinstance(at, dict) and not isinstance(at.get(key), dict | list):
            at[key] = {}
        at = at[key]
    at[path[-1]] = new
    return made


def encoded(value: Any) -> bytes:
    """As JSON, with NaN and lone surrogates as the caller wrote them."""
    return json.dumps(value).encode()


_OTHER_FIELDS = (
    [(name,) for name in (*HARMLESS, *REFUSED)]
    + [tuple(name.split(".")) for name in FIELDS]
    + [("no such field",), ("",)]
)


@dataclass(frozen=True, slots=True)
class Target:
    """A route with a body: what is sent when nothing is wrong, and fields beside those that stand in it."""

    method: str
    path: str
    bodies: tuple[dict[str, Any], ...]
    fields: tuple[tuple[str | int, ...], ...] = ()
    schema_fields: tuple[tuple[str | int, ...], ...] = ()


_CHAT_FIELDS = tuple((name,) for name in ChatRequest.model_fields) + tuple(_OTHER_FIELDS)
_COMPLETION_FIELDS = tuple((name,) for name in CompletionRequest.model_fields) + tuple(_OTHER_FIELDS)
_TOKENIZE_FIELDS = tuple(
    (name,) for name in {**TokenizePrompt.model_fields, **TokenizeMessages.model_fields, **TOKENS_REFUSED}
)
_DETOKENIZE_FIELDS = tuple((name,) for name in Detokenize.model_fields)
_RELAYED_FIELDS = tuple((name,) for name in {*TAKEN_OUT, "vllm_xargs", "stream"}) + tuple(_OTHER_FIELDS)
_RESPONSE_FIELDS = tuple(
    (name,) for name in {**ResponseRequest.model_fields, **RESPONSES_REFUSED, **dict.fromkeys(EXTRAS)}
)
_MESSAGE_FIELDS = tuple(
    (name,) for name in {**MessageRequest.model_fields, **MESSAGES_REFUSED, **dict.fromkeys(EXTRAS)}
)
TARGETS = {
    "chat": Target("POST", "/v1/chat/completions", (CHAT, TURNS, WITH_TOOLS, WITH_FORMAT, CHAT | HINTS), _CHAT_FIELDS, (
        ("response_format", "json_schema", "schema"), ("tools", 0, "function", "parameters"))),
    "completions": Target("POST", "/v1/completions", (COMPLETION,
    COMPLETION | {"prompt": ["a", [1, 2]], "logprobs": 1}),
    _COMPLETION_FIELDS),
    "tokenize": Target("POST", "/tokenize", (TOKENIZE, TOKENIZE_CHAT, CONTINUED), _TOKENIZE_FIELDS),
    "detokenize": Target("POST", "/detokenize", (DETOKENIZE,), _DETOKENIZE_FIELDS),
    "responses": Target("POST", "/v1/responses", (RESPONSE, ITEMS, CONTINUED_RESPONSE, BACKGROUND), _RESPONSE_FIELDS,
        (("text", "format", "schema"), ("tools", 0, "parameters"))),
    "messages": Target("POST", "/v1/messages", (ANTHROPIC, BLOCKS), _MESSAGE_FIELDS,
        (("output_config", "format", "schema"), ("tools", 0, "input_schema"))),
    "count_tokens": Target("POST", "/v1/messages/count_tokens", (ANTHROPIC, BLOCKS), _MESSAGE_FIELDS),
    "embeddings": Target("POST", "/v1/embeddings", (EMBEDDING,), _RELAYED_FIELDS),
    "advisory": Target("POST", "/v1/advisory", (ADVISORY, {"advisories": [ADVISORY, {"session_id": "b"}]},
    ADVISORY | {"token": "ek_a"})),
    "invalidate": Target("POST", "/v1/invalidate", ({"session_id": "hostile"}, {"advisory_id": "adv-1"},
    {"session_id": "a",
    "token": "x"})),
    "client_secrets": Target("POST", "/v1/client_secrets", (SECRET, {"session_prefix": "hostile"})),
    "workflows": Target("PUT", "/v1/workflows/hostile", (GRAPH,)),
    "fine_tuning": Target("POST", "/v1/fine_tuning/jobs", (TUNING, FORMER_TUNING),
    tuple((name,) for name in (*JobRequest.model_fields, "integrations"))),
}  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn, target: Target) -> Case:
    """A right body with one to three values replaced."""
    body: Any = draw(st.sampled_from(target.bodies))
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        places = [*paths(body), *target.fields] if isinstance(body, dict | list) else []
        if not places:
            break
        path = draw(st.sampled_from(places))
        name = str(path[0])
        legal = LEGAL.get(name) if len(path) == 1 else None
        value = draw(VALUES if legal is None else VALUES | legal)
        try:
            body = put(body, path, value)
        except (TypeError, IndexError, KeyError):
            continue  # an earlier mutation took the place away
    return Case(target.method, target.path, dict(JSON), encoded(body), _is_long(body))


@st.composite
def extreme(draw: st.DrawFn, target: Target) -> Case:
    """Legal values at the ends of their ranges, several at a time: the engine has to compute these."""
    body = dict(draw(st.sampled_from(target.bodies)))
    names = draw(st.lists(st.sampled_from(sorted(LEGAL)), min_size=1, max_size=6, unique=True))
    for name in names:
        if (name,) in target.fields:
            body[name] = draw(LEGAL[name])
    if isinstance(body.get("n"), int) and body["n"] > 1:
        body["max_tokens"] = min(body.get("max_tokens", 2), 2)
    return Case(target.method, target.path, dict(JSON), encoded(body), _is_long(body))


@st.composite
def with_schema(draw: st.DrawFn) -> Case:
    """A grammar that is odd, impossible, or expensive."""
    target = TARGETS["chat"]
    place = draw(st.sampled_from(target.schema_fields))
    schema = draw(
        st.sampled_from(SCHEMAS)
        | st.dictionaries(
            st.sampled_from(["type", "enum", "properties", "items", "pattern", "$ref"]), VALUES, max_size=3
        )
    )
    return Case(
        target.method,
        target.path,
        dict(JSON),
        encoded(put(WITH_FORMAT if place[0] == "response_format" else WITH_TOOLS, place, schema)),
    )


_HEADER_NAMES = [*HEADERS, *THREADS.values(), FINAL, PRIORITY, "X-Upbeat-Node", "X-Upbeat-Workflow", "X-Upbeat-Agent",
"X-Upbeat-Run",
    "X-Upbeat-Timing",
    "Content-Type", "Accept",
                 "Content-Encoding", "Origin", "Expect", "X-Request-Id", "Idempotency-Key", "Cookie",
                 "Transfer-Encoding", "Range",
                 "Connection"]  # fmt: skip
_HEADER_VALUES = st.sampled_from(["", "a", "node-0", "node-99", "gzip", "identity", "text/plain",
"application/json; charset=utf-16",
    "100-continue", "chunked", "close", "-1",
                                  "1e300", "null", "true", "https://evil.example", "é", "a" * 129, "x" * 6000, "a:b:c",
                                  "%s%n",
                                  "0" * 400])  # fmt: skip


@st.composite
def with_headers(draw: st.DrawFn) -> Case:
    """A right body under odd headers."""
    target = TARGETS[draw(st.sampled_from(sorted(TARGETS)))]
    headers = JSON | draw(st.dictionaries(st.sampled_from(_HEADER_NAMES), _HEADER_VALUES, min_size=1, max_size=3))
    return Case(target.method, target.path, headers, encoded(draw(st.sampled_from(target.bodies))))


_ID = st.sampled_from(
    ["hostile", "a", "a/b", "..", "%2e%2e", "%00", "é", "a" * 200, "imp-0", "*", "?", "honest-0-alone"]
)
_BARE = ["/v1/sessions", "/v1/sessions/{}", "/v1/sessions/{}/placement", "/v1/sessions/{}/events", "/v1/models",
"/v1/models/{}",
    "/v1/workflows", "/v1/workflows/{}",
    "/v1/files", "/v1/files/{}", "/v1/files/{}/content", "/v1/fine_tuning/jobs", "/v1/fine_tuning/jobs/{}",
    "/v1/fine_tuning/jobs/{}/cancel", "/v1/fine_tuning/jobs/{}/events", "/v1/fine_tuning/jobs/{}/checkpoints",
         "/v1/fleet", "/health", "/ready", "/version", "/metrics", "/openapi.json", "/docs", "/", "/upbeat.js",
         "/playground/{}",
    "/v1/responses", "/v1/responses/{}", "/v1/responses/{}/input_items", "/v1/responses/{}/cancel", "/v1/messages",
         "/v1/embeddings", "/tokenize", "/detokenize", "/nowhere/{}"]  # fmt: skip


@st.composite
def bare(draw: st.DrawFn) -> Case:
    """Any method on any path, odd queries, and bodies where none belongs."""
    path = draw(st.sampled_from(_BARE)).format(draw(_ID))
    query = draw(
        st.sampled_from(
            [
                "",
                "?limit=0",
                "?limit=-1",
                "?limit=1e9",
                "?limit=99999999999999999999",
                "?limit=%00",
                "?after=a",
                "?metrics=true",
                "?metrics=x",
                "?a=b&a=c",
                "?" + "x" * 3000,
            ]
        )
    )
    method = draw(
        st.sampled_from(["GET", "GET", "GET", "DELETE", "POST", "PUT", "PATCH", "OPTIONS", "HEAD", "TRACE", "BREW"])
    )
    body = draw(
        st.none() | st.sampled_from([b"", b"{}", b"[]", b"null", b"\xff\xfe", b"{" * 500, b'{"a":1', b"0" * 5000])
    )
    return Case(method, path + query, dict(JSON), body, path.endswith("/events"))


@st.composite
def broken(draw: st.DrawFn) -> Case:
    """Bodies that are no JSON, or JSON of another kind."""
    target = TARGETS[draw(st.sampled_from(sorted(TARGETS)))]
    right = encoded(target.bodies[0])
    cut = draw(st.integers(0, len(right)))
    body = draw(st.sampled_from([right[:cut], right[:cut] + b"\xff" + right[cut:], right + b"}", b"[" * 3000,
    b'{"a":' * 400,
    b"1" * 6000, b'"' + b"\\u0000" * 99 + b'"',
                                 b"nan", b"\xef\xbb\xbf" + right, right.replace(b"{", b'{"model":1,', 1),
                                 b"[" + right + b"]"]) | st.binary(max_size=200))  # fmt: skip
    return Case(target.method, target.path, dict(JSON), body)


_PART_NAMES = st.sampled_from(
    ["file", "file", "purpose", "purpose", "expires_after[seconds]", "a", "", "file\0", "é" * 99]
)
_PART_VALUES = st.sampled_from(
    [PURPOSE.encode(), b"batch", b'{"text": "a"}\n', b"", b"\0" * 999, b"--XX", b"\r\n--XX--\r\n", b"x" * 70_000]
) | st.binary(max_size=99)
_PART_HEADERS = st.sampled_from(
    [
        "",
        "",
        "",
        "Content-Type: application/jsonl\r\n",
        "Content-Type: multipart/mixed; boundary=YY\r\n",
        "Content-Transfer-Encoding: base64\r\n",
        "Content-Encoding: gzip\r\n",
        "Content-Length: -1\r\n",
        "X: " + "a" * 9000 + "\r\n",
        "A: b\r\n" * 300,
        "no header\r\n",
        "Content-Disposition: form-data\r\n",
    ]
)
_FILE_NAMES = st.sampled_from(["", "d.jsonl", "../../etc/passwd", "a\0b", "\\..\\x", "é" * 300, "%00", "UTF-8''%ff"])


@st.composite
def forms(draw: st.DrawFn) -> Case:
    """Uploads: odd parts, names, headers and boundaries."""
    boundary = draw(st.sampled_from(["XX", "XX", "XX", "", "x" * 71, '"', "YY"]))
    body = draw(st.sampled_from([b"", b"", b"before\r\n"]))
    for name, value, headers, file_name in draw(
        st.lists(st.tuples(_PART_NAMES, _PART_VALUES, _PART_HEADERS, _FILE_NAMES), max_size=10)
    ):
        named = f'form-data; name="{name}"' + (f'; filename="{file_name}"' if file_name else "")
        body += f"--XX\r\nContent-Disposition: {named}\r\n{headers}\r\n".encode() + value + b"\r\n"
    body += draw(st.sampled_from([b"--XX--\r\n", b"--XX--\r\n", b"--XX--", b"--XX", b"", b"--XX--\r\nafter"]))
    kind = draw(st.sampled_from(["multipart/form-data", "multipart/form-data", "multipart/mixed", "text/plain"]))
    return Case("POST", "/v1/files", {"Content-Type": f"{kind}; boundary={boundary}"}, body)


def described(label: str, mode: GenerationMode) -> st.SearchStrategy[Case]:
    """What schemathesis makes of the API's own description of one operation."""
    operation = OPERATIONS[label]

    def case_of(generated: Any) -> Case:
        made = requests.Request(**generated.as_transport_kwargs("http://host")).prepare()
        assert made.url is not None
        body = made.body.encode() if isinstance(made.body, str) else made.body
        return Case(
            str(made.method),
            made.url.removeprefix("http://host"),
            JSON | {str(k): str(v) for k, v in made.headers.items()},
            body,
            True,
        )

    return operation.as_strategy(generation_mode=mode).map(case_of)


OPERATIONS = {
    operation.label: operation
    for operation in (found.ok() for found in schemathesis.openapi.from_dict(openapi()).get_all_operations())
}


def _is_long(body: Any) -> bool:
    """Its answer may be as long as the model's context."""
    most = body.get("max_tokens", body.get("max_output_tokens")) if isinstance(body, dict) else None
    return not (isinstance(most, int) and 1 <= most <= 64)


#: By name: what is tried, and how often of a hundred cases.
KINDS: dict[str, tuple[int, Callable[[], st.SearchStrategy[Case]]]] = {
    "mutated chat": (24, lambda: mutated(TARGETS["chat"])),
    "mutated completions": (10, lambda: mutated(TARGETS["completions"])),
    "extreme chat": (14, lambda: extreme(TARGETS["chat"])),
    "extreme completions": (8, lambda: extreme(TARGETS["completions"])),
    "mutated responses": (8, lambda: mutated(TARGETS["responses"])),
    "mutated messages": (8, lambda: mutated(TARGETS["messages"])),
    "schemas": (6, with_schema),
    "headers": (6, with_headers),
    "bare": (8, bare),
    "broken": (6, broken),
    "forms": (6, forms),
    **{
        f"mutated {name}": (3, lambda name=name: mutated(TARGETS[name]))
        for name in (
            "tokenize",
            "detokenize",
            "count_tokens",
            "advisory",
            "invalidate",
            "client_secrets",
            "workflows",
            "fine_tuning",
        )
    },  # type: ignore[misc]
    "described": (6, lambda: st.none()),  # type: ignore[arg-type,return-value]
}
