"""`POST /v1/completions`: one prompt or several, each with `n` choices."""

from __future__ import annotations

import secrets
from dataclasses import replace

from aiohttp import web

from contracts.errors import InvalidRequest
from gateway.core.implicit import after_completion, of_prompt
from gateway.intake import caller_of, read_json
from gateway.openai.parameters import validate
from gateway.openai.requests import CompletionRequest
from gateway.openai.responses import Choice, CompletionShape
from gateway.parts import PARTS
from gateway.routes.answer import Part, answer, new_job

MAX_ALL_CHOICES = 64


async def create(request: web.Request) -> web.StreamResponse:
    """A raw completion of each prompt."""
    parts = request.app[PARTS]
    caller_of(request)
    wanted = validate(CompletionRequest, await read_json(request))
    if len(wanted.prompt) * (wanted.n or 1) > MAX_ALL_CHOICES:
        raise InvalidRequest(f"prompt times n must be at most {MAX_ALL_CHOICES} choices", param="n")
    request_id = f"cmpl-{secrets.token_hex(12)}"
    prompts = [_part(request, wanted, prompt, request_id) for prompt in wanted.prompt]
    shape = CompletionShape(request_id, wanted.model, int(parts.clock.wall()), wanted.include_usage, wanted.logprobs is not None)
    return await answer(request, wanted, prompts, shape)


def _part(request: web.Request, wanted: CompletionRequest, prompt: str | list[int], request_id: str) -> Part:
    parts, caller = request.app[PARTS], caller_of(request)
    history = of_prompt(caller.tenant, wanted.model, prompt)
    session = parts.sessions.resolve(caller.tenant, request.headers, wanted.session_id, wanted.prompt_cache_key, history)
    job = new_job(request, wanted, caller, session, request_id)
    job = replace(job, prompt=prompt) if isinstance(prompt, str) else replace(job, prompt_tokens=prompt)

    def ended(choice: Choice, tokens: list[int]) -> None:
        parts.sessions.remember(session, after_completion(history, "".join(choice.text) if isinstance(prompt, str) else tokens))

    return Part(session, job, ended)
