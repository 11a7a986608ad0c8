"""`POST /v1/messages` and `/v1/messages/count_tokens`: answers in the format of Anthropic's Messages API."""

from __future__ import annotations

import json
import secrets

from aiohttp import web

from contracts.errors import RequestError
from contracts.v1 import worker_pb2 as pb
from gateway.anthropic.events import MessageAnswer
from gateway.core.admission import Caller
from gateway.core.implicit import after_answer, with_calls
from gateway.core.relay_bodies import Relayed
from gateway.core.renaming import OF_MESSAGES, renamed
from gateway.inline_hints import expect_result
from gateway.intake import caller_of, read_count, read_message
from gateway.openai.asked import Asked
from gateway.openai.chat_reader import ChatReader, error_of
from gateway.openai.responses import Choice, Usage
from gateway.parts import PARTS
from gateway.routes.answer import Keep, Part, answer, new_job
from gateway.routes.relayed import relay
from gateway.routes.tokens import counted
from gateway.routes.translated import relay_translated
from gateway.sessions import Resolved, stated


async def create(request: web.Request) -> web.StreamResponse:
    """One turn."""
    parts, caller = request.app[PARTS], caller_of(request)
    wanted = await read_message(request, caller)
    asked, message_id = wanted.asked, f"msg_{secrets.token_hex(12)}"
    answering = MessageAnswer(message_id, asked.model)
    try:
        named = stated(request.headers, asked.session_id, asked.prompt_cache_key, asked.said.session_id)
        if isinstance(asked, Relayed):
            session = parts.sessions.resolve(caller.tenant, named, asked.history)
            reader = ChatReader(thoughts=wanted.thoughts, splits=True)
            keep = _expecting(request, caller, session, asked)
            return await relay_translated(request, caller, asked, session, message_id, answering, reader, keep)
        prompt = asked.prompts[0]
        session = parts.sessions.resolve(caller.tenant, named, prompt.history)
        job = new_job(request, asked, prompt, caller, session, message_id)

        def ended(choice: Choice, _tokens: list[int]) -> None:
            called = [[call.name, call.arguments] for call in choice.calls]
            text = "".join(choice.text)
            parts.sessions.remember(session, lambda history: after_answer(history, with_calls(text, called)))

        keep = _expecting(request, caller, session, asked)
        return await answer(request, caller, asked, [Part(session, job, ended)], answering, keep)
    except RequestError as e:
        raise renamed(e, OF_MESSAGES) from None


def _expecting(request: web.Request, caller: Caller, session: Resolved, asked: Asked | Relayed) -> Keep:
    """Hints that the results of an answer's calls come."""

    async def keep(choices: list[Choice], _usage: Usage) -> dict[str, object]:
        if choices[0].calls:
            expect_result(request, caller, session.key.session_id, asked.model, asked.priority or 0)
        return {}

    return keep


async def count_tokens(request: web.Request) -> web.StreamResponse:
    """The number of tokens of a prompt."""
    caller = caller_of(request)
    asked = await read_count(request, caller)
    try:
        if isinstance(asked, Relayed):
            return _count_of(await relay(request, caller, asked))
        question = pb.TokenizeRequest(
            tenant=caller.tenant,
            messages=asked.messages,
            tools=asked.tools,
            template_kwargs=asked.template_kwargs,
            add_generation_prompt=True,
        )
        return await counted(request, caller, asked, question)
    except RequestError as e:
        raise renamed(e, OF_MESSAGES) from None


def _count_of(told: web.StreamResponse) -> web.Response:
    """The count alone, of an engine's answer to `/tokenize`. Raises RequestError for another one."""
    body = told.body if isinstance(told, web.Response) else None
    try:
        value = json.loads(body) if isinstance(body, bytes) else {}
    except ValueError:
        value = {}
    if told.status != 200 or type(value.get("count")) is not int:
        raise error_of(value, told.status if told.status >= 400 else 503)
    headers = {name: value for name, value in told.headers.items() if name.startswith("X-") or name == "Server-Timing"}
    return web.json_response({"input_tokens": value["count"]}, headers=headers)
