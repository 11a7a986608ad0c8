"""`POST /v1/chat/completions`."""

from __future__ import annotations

import secrets
from dataclasses import replace

from aiohttp import web

from gateway.core.implicit import after_answer, of_messages
from gateway.intake import caller_of, read_json
from gateway.openai.parameters import validate
from gateway.openai.requests import ChatRequest
from gateway.openai.responses import ChatShape
from gateway.parts import PARTS
from gateway.routes.answer import Part, answer, new_job


async def create(request: web.Request) -> web.StreamResponse:
    """One chat turn."""
    parts = request.app[PARTS]
    caller = caller_of(request)
    wanted = validate(ChatRequest, await read_json(request))
    messages = [m.plain() for m in wanted.messages]
    history = of_messages(caller.tenant, wanted.model, messages)
    session = parts.sessions.resolve(caller.tenant, request.headers, wanted.session_id, wanted.prompt_cache_key, history)
    request_id = f"chatcmpl-{secrets.token_hex(12)}"
    job = replace(new_job(request, wanted, caller, session, request_id), messages=[dict(m) for m in messages])
    shape = ChatShape(request_id, wanted.model, int(parts.clock.wall()), wanted.include_usage, bool(wanted.logprobs))

    def ended(text: str, _tokens: list[int]) -> None:
        parts.sessions.remember(session, after_answer(history, text))

    return await answer(request, wanted, [Part(session, job, ended)], shape)
