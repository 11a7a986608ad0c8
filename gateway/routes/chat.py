"""`POST /v1/chat/completions`."""

from __future__ import annotations

import json
import secrets
from typing import Any

from aiohttp import web

from gateway.core import spellings
from gateway.core.implicit import after_answer, of_messages
from gateway.intake import caller_of, read_json
from gateway.openai.parameters import validate
from gateway.openai.requests import ChatRequest
from gateway.openai.responses import ChatShape, Choice
from gateway.parts import PARTS
from gateway.routes.answer import Part, answer, new_job
from gateway.sessions import stated


async def create(request: web.Request) -> web.StreamResponse:
    """One chat turn."""
    parts = request.app[PARTS]
    caller = caller_of(request)
    body = await read_json(request)
    wanted = validate(ChatRequest, body)
    said = spellings.read(body, request.headers)
    messages = [m.plain() for m in wanted.messages]
    session = parts.sessions.resolve(
        caller.tenant,
        stated(request.headers, wanted.session_id, wanted.prompt_cache_key, said.session_id),
        lambda: of_messages(caller.tenant, wanted.model, [_said(m) for m in messages]),
    )
    request_id = f"chatcmpl-{secrets.token_hex(12)}"
    job = new_job(request, wanted, said, caller, session, request_id, messages=messages, tool_use=wanted.tool_use)
    shape = ChatShape(request_id, wanted.model, int(parts.clock.wall()), wanted.include_usage, bool(wanted.logprobs))

    def ended(choice: Choice, _tokens: list[int]) -> None:
        called = [[call.name, call.arguments] for call in choice.calls]
        parts.sessions.remember(session, lambda history: after_answer(history, _with_calls("".join(choice.text), called)))

    return await answer(request, caller, wanted, [Part(session, job, ended)], shape, said)


def _said(message: dict[str, Any]) -> dict[str, str]:
    """The message as the history sees it: calls are part of what an assistant said."""
    called = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
    return {"role": message["role"], "content": _with_calls(message["content"], called)}


def _with_calls(text: str, called: list[list[str]]) -> str:
    return text.strip() + json.dumps(called) if called else text
