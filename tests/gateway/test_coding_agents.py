"""What Claude Code and Codex send, in their order: each request is answered as they read it, their session is found,
and a hint goes out by itself while their tools run.

The shapes are those of their public documents: Claude Code's gateway protocol and captures of its requests
(code.claude.com/docs/en/llm-gateway-protocol), Codex's `ResponsesApiRequest` (github.com/openai/codex, codex-api).
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from anthropic.types import RawMessageStreamEvent
from fake_sidecar import HttpStack, http_stack
from gateway_fakes import MODEL, Stack, stack, until
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

SESSION = "b4e5aaaa-9a3e-47c4-84ad-3a70f38c676e"
ANTHROPIC: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
OPENAI: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(params=["native", "vllm"])
async def s(request: pytest.FixtureRequest) -> AsyncIterator[Stack]:
    """A fleet of either kind, whose model calls a tool when it has to."""
    if request.param == "native":
        async with stack(1) as native:
            yield native
    else:
        async with http_stack(1) as http:
            http.sidecars[0].call = ("Read", '{"file_path": "/a"}')
            yield http


async def streamed(s: Stack, path: str, body: dict[str, Any], headers: dict[str, str]) -> tuple[list[Any], str]:
    """The events, checked by the official types, and the session."""
    async with s.http.post(s.url + path, json=body, headers=headers) as r:
        text = (await r.read()).decode()
        assert r.status == 200, text
        session = r.headers["X-Session-Id"]
    found = [json.loads(part.split("data: ", 1)[1]) for part in text.split("\n\n") if "data: " in part]
    for event in found:
        (ANTHROPIC if path.startswith("/v1/messages") else OPENAI).validate_python(event)
    return found, session


def prompts(s: Stack) -> list[list[dict[str, Any]]]:
    """The messages that the engine got, by request."""
    if isinstance(s, HttpStack):
        return [h.body["messages"] for h in s.heard if h.head.path == "/v1/chat/completions"]
    return [request.messages or [] for request in s.workers[0].submitted]


# ---- Claude Code -----------------------------------------------------------------------------------------------------
CLAUDE_HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,adaptive-thinking-2026-01-28,context-management-2025-06-27,"
    "prompt-caching-scope-2026-01-05,advanced-tool-use-2025-11-20,effort-2025-11-24",
    "anthropic-dangerous-direct-browser-access": "true",
    "x-app": "cli",
    "User-Agent": "claude-cli/2.1.69 (external, cli)",
    "X-Stainless-Lang": "js",
    "Authorization": "Bearer sk-any",
}
MARK = {"type": "ephemeral", "ttl": "1h"}
READ = {
    "name": "Read",
    "description": "Reads a file.",
    "input_schema": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"file_path": {"description": "The path", "type": "string"}, "limit": {"type": "number"}},
        "required": ["file_path"],
        "additionalProperties": False,
    },
}
MCP = {"name": "mcp__plugin_" + "x" * 60 + "__look", "description": "d", "input_schema": {"type": "object"}}


def claude(messages: list[Any], **more: Any) -> dict[str, Any]:
    """A turn, with a billing header that differs each time."""
    system = [
        {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.69.f{len(messages)}; cch=00000;"},
        {"type": "text", "text": "You are Claude Code.", "cache_control": MARK},
        {"type": "text", "text": "Use the tools.", "cache_control": MARK},
    ]
    made = {
        "model": MODEL, "messages": messages, "system": system, "tools": [READ, MCP], "max_tokens": 5, "stream": True,
        "metadata": {"user_id": json.dumps({"device_id": "0" * 64, "account_uuid": "", "session_id": SESSION})},
        "thinking": {"type": "adaptive"}, "output_config": {"effort": "medium"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }  # fmt: skip
    return made | more


async def test_claude_code(s: Stack) -> None:
    path = "/v1/messages?beta=true"
    async with s.http.head(s.url) as r:  # it looks whether the address is there
        assert r.status < 500
    quota = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "quota"}]}
    status, _, _ = await s.post(path, quota | {"metadata": claude([])["metadata"]}, headers=CLAUDE_HEADERS)
    assert status == 200
    first: dict[str, Any] = {"role": "user", "content": [
        {"type": "text", "text": "<system-reminder>\nBe kind.\n</system-reminder>\n"},
        {"type": "text", "text": "Read /a.", "cache_control": MARK},
    ]}  # fmt: skip
    schema = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}
    form = {"format": {"type": "json_schema", "schema": schema}}
    titled = claude([first], tools=[], output_config=form, thinking={"type": "disabled"})
    await streamed(s, path, titled, CLAUDE_HEADERS)
    before = 2 if isinstance(s, HttpStack) else 0  # that engine's answers always have a call
    await until(lambda: len(s.scheduler.advised) == before)
    forced = {"tool_choice": {"type": "tool", "name": "Read"}} if not isinstance(s, HttpStack) else {}
    events, session = await streamed(s, path, claude([first], **forced), CLAUDE_HEADERS)
    assert session == SESSION
    starts = [e["content_block"] for e in events if e["type"] == "content_block_start"]
    [use] = [block for block in starts if block["type"] == "tool_use"]
    arguments = [e["delta"]["partial_json"] for e in events if e.get("delta", {}).get("type") == "input_json_delta"]
    assert use["name"] == "Read" and events[-2]["delta"]["stop_reason"] == "tool_use"
    await until(lambda: len(s.scheduler.advised) == before + 1)
    assert s.scheduler.advised[-1].session.session_id == SESSION, "its results come: a hint by itself"
    answer = {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "hm", "signature": "unsigned"},
        {"type": "tool_use", "id": use["id"], "name": "Read", "input": json.loads("".join(arguments)),
         "caller": {"type": "direct"}},
    ]}  # fmt: skip
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "1\tK4417", "cache_control": MARK}
    second = [first, answer, {"role": "user", "content": [result]}]
    status, counted, _ = await s.post(
        "/v1/messages/count_tokens?beta=true",
        {"model": MODEL, "messages": second, "tools": [READ], "system": "Use the tools."},
        headers=CLAUDE_HEADERS,
    )
    assert status == 200 and counted["input_tokens"] > 0
    _, session = await streamed(s, path, claude(second), CLAUDE_HEADERS)
    assert session == SESSION
    before_call, after_call = prompts(s)[-2:]
    assert after_call[: len(before_call)] == before_call, "a prompt goes on where the last one ended"
    assert [m["role"] for m in after_call] == ["system", "user", "assistant", "tool"]
    agent = CLAUDE_HEADERS | {"X-Claude-Code-Session-Id": SESSION, "X-Claude-Code-Agent-Id": "a1b2"}
    _, session = await streamed(s, path, claude([first]), agent)
    assert session == f"{SESSION}.a1b2", "a subagent has a thread of its own"


# ---- Codex -----------------------------------------------------------------------------------------------------------
CODEX_HEADERS = {
    "originator": "codex_cli_rs",
    "User-Agent": "codex_cli_rs/0.98.0 (Linux)",
    "session_id": SESSION,
    "Accept": "text/event-stream",
    "OpenAI-Beta": "responses=experimental",
    "Authorization": "Bearer any",
}
SHELL = {
    "type": "function",
    "name": "Read",
    "description": "Runs a command.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"command": {"type": "array", "items": {"type": "string"}}, "workdir": {"type": "string"}},
        "required": ["command"],
        "additionalProperties": False,
    },
}


def said(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


def codex(items: list[Any], **more: Any) -> dict[str, Any]:
    made = {
        "model": MODEL, "instructions": "You are Codex.", "input": items, "tools": [SHELL], "tool_choice": "auto",
        "parallel_tool_calls": False, "reasoning": {"effort": "medium", "summary": "auto"}, "store": False,
        "stream": True, "include": ["reasoning.encrypted_content"], "prompt_cache_key": SESSION,
        "text": {"verbosity": "medium"}, "max_output_tokens": 5,
    }  # fmt: skip
    return made | more


async def test_codex(s: Stack) -> None:
    opening = [
        said("developer", "<permissions>read-only</permissions>"),
        said("user", "<environment_context>\n<cwd>/</cwd>\n</environment_context>"),
        said("user", "Read /a."),
    ]
    forced = {"tool_choice": "required"} if not isinstance(s, HttpStack) else {}
    events, session = await streamed(s, "/v1/responses", codex(opening, **forced), CODEX_HEADERS)
    assert session == SESSION
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert events[0]["type"] == "response.created" and events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["output"] == done and events[-1]["response"]["usage"]["total_tokens"] > 0
    [call] = [item for item in done if item["type"] == "function_call"]
    await until(lambda: bool(s.scheduler.advised))
    assert s.scheduler.advised[-1].session.session_id == SESSION, "its results come: a hint by itself"
    # It sends back what it has read, with the encrypted content that it may have, and without ids.
    back: list[Any] = []
    for item in done:
        kept = {k: v for k, v in item.items() if k not in ("id", "status")}
        back.append(kept | {"encrypted_content": None} if item["type"] == "reasoning" else kept)
    back.append({"type": "function_call_output", "call_id": call["call_id"], "output": '{"output":"K4417"}'})
    _, session = await streamed(s, "/v1/responses", codex([*opening, *back]), CODEX_HEADERS)
    assert session == SESSION
    before_call, after_call = prompts(s)[-2:]
    assert after_call[: len(before_call)] == before_call, "a prompt goes on where the last one ended"
    assert [m["role"] for m in after_call] == ["system", "user", "user", "assistant", "tool"]
