"""`POST /v1/completions`: one prompt or several, each with `n` choices."""

from __future__ import annotations

import secrets

from aiohttp import web

from contracts.errors import InvalidRequest
from gateway.core import spellings
from gateway.core.admission import Caller
from gateway.core.implicit import after_completion, of_prompt
from gateway.core.spellings import Spelled
from gateway.intake import caller_of, read_json
from gateway.openai.parameters import validate
from gateway.openai.requests import CompletionRequest
from gateway.openai.responses import Choice, CompletionShape
from gateway.parts import PARTS
from gateway.routes.answer import Part, answer, new_job
from gateway.sessions import stated

MAX_ALL_CHOICES = 64


async def create(request: web.Request) -> web.StreamResponse:
    """A raw completion of each prompt."""
    parts = request.app[PARTS]
    caller = caller_of(request)
    body = await read_json(request)
    wanted = validate(CompletionRequest, body)
    said = spellings.read(body, request.headers)
    if len(wanted.prompt) * (wanted.n or 1) > MAX_ALL_CHOICES:
        raise InvalidRequest(f"prompt times n must be at most {MAX_ALL_CHOICES} choices", param="n")
    request_id = f"cmpl-{secrets.token_hex(12)}"
    prompts = [_part(request, caller, wanted, said, prompt, request_id) for prompt in wanted.prompt]
    shape = CompletionShape(request_id, wanted.model, int(parts.clock.wall()), wanted.include_usage, wanted.logprobs is not None)
    return await answer(request, caller, wanted, prompts, shape, said)


def _part(request: web.Request, caller: Caller, wanted: CompletionRequest, said: Spelled, prompt: str | list[int], request_id: str) -> Part:
    parts = request.app[PARTS]
    session = parts.sessions.resolve(
        caller.tenant,
        stated(request.headers, wanted.session_id, wanted.prompt_cache_key, said.session_id),
        lambda: of_prompt(caller.tenant, wanted.model, prompt),
    )
    asked = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_tokens": prompt}
    job = new_job(request, wanted, said, caller, session, request_id, **asked)

    def ended(choice: Choice, tokens: list[int]) -> None:
        answered = "".join(choice.text) if isinstance(prompt, str) else tokens
        parts.sessions.remember(session, lambda history: after_completion(history, answered))

    return Part(session, job, ended)
