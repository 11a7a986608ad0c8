"""`POST /v1/completions`: one prompt or several, each with `n` choices."""

from __future__ import annotations

import secrets

from aiohttp import web

from gateway.answering import Chunks
from gateway.core.admission import Caller
from gateway.core.implicit import after_completion
from gateway.core.relay_bodies import Relayed
from gateway.intake import caller_of, read_asked
from gateway.openai.asked import Asked, Prompt
from gateway.openai.responses import Choice, CompletionShape
from gateway.parts import PARTS
from gateway.routes.answer import Part, answer, new_job
from gateway.routes.relayed import relay
from gateway.sessions import stated


async def create(request: web.Request) -> web.StreamResponse:
    """A raw completion of each prompt."""
    parts = request.app[PARTS]
    caller = caller_of(request)
    asked = await read_asked(request, "completion", caller)
    if isinstance(asked, Relayed):
        return await relay(request, caller, asked)
    request_id = f"cmpl-{secrets.token_hex(12)}"
    prompts = [_part(request, caller, asked, prompt, request_id) for prompt in asked.prompts]
    shape = CompletionShape(request_id, asked.model, int(parts.clock.wall()), asked.include_usage, asked.logprobs)
    return await answer(request, caller, asked, prompts, Chunks(shape, include_usage=asked.include_usage))


def _part(request: web.Request, caller: Caller, asked: Asked, prompt: Prompt, request_id: str) -> Part:
    parts = request.app[PARTS]
    named = stated(request.headers, asked.session_id, asked.prompt_cache_key, asked.said.session_id)
    session = parts.sessions.resolve(caller.tenant, named, prompt.history)
    job = new_job(request, asked, prompt, caller, session, request_id)

    def ended(choice: Choice, tokens: list[int]) -> None:
        answered = "".join(choice.text) if prompt.is_text else tokens
        parts.sessions.remember(session, lambda history: after_completion(history, answered))

    return Part(session, job, ended)
