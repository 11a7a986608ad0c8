"""`POST /v1/chat/completions`."""

from __future__ import annotations

import secrets

from aiohttp import web

from gateway.answering import Chunks
from gateway.core.implicit import after_answer, with_calls
from gateway.core.relay_bodies import Relayed
from gateway.intake import caller_of, read_asked
from gateway.openai.responses import ChatShape, Choice
from gateway.parts import PARTS
from gateway.routes.answer import Part, answer, new_job
from gateway.routes.relayed import relay
from gateway.sessions import stated


async def create(request: web.Request) -> web.StreamResponse:
    """One chat turn."""
    parts = request.app[PARTS]
    caller = caller_of(request)
    asked = await read_asked(request, "chat", caller)
    if isinstance(asked, Relayed):
        return await relay(request, caller, asked)
    prompt = asked.prompts[0]
    named = stated(request.headers, asked.session_id, asked.prompt_cache_key, asked.said.session_id)
    session = parts.sessions.resolve(caller.tenant, named, prompt.history)
    request_id = f"chatcmpl-{secrets.token_hex(12)}"
    job = new_job(request, asked, prompt, caller, session, request_id)
    shape = ChatShape(request_id, asked.model, int(parts.clock.wall()), asked.include_usage, asked.logprobs)

    def ended(choice: Choice, _tokens: list[int]) -> None:
        called = [[call.name, call.arguments] for call in choice.calls]
        parts.sessions.remember(
            session, lambda history: after_answer(history, with_calls("".join(choice.text), called))
        )

    chunks = Chunks(shape, include_usage=asked.include_usage)
    return await answer(request, caller, asked, [Part(session, job, ended)], chunks)
