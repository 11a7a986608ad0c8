"""`/v1/responses`: answers in the format of OpenAI's Responses API, and the responses that are stored."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from aiohttp import web

from contracts.errors import InvalidRequest, RequestError, Unavailable
from gateway import sse
from gateway.core.admission import Caller
from gateway.core.implicit import after_answer, with_calls
from gateway.core.relay_bodies import Relayed
from gateway.core.renaming import OF_RESPONSES, renamed
from gateway.envelope import OUTLIVES
from gateway.generate import check_model
from gateway.inline_hints import expect_result
from gateway.intake import caller_of, query_caller_of, read_response
from gateway.openai.chat_reader import ChatReader
from gateway.openai.responses import Choice, Usage
from gateway.parts import PARTS
from gateway.request_ids import HEADER, labelled, shown
from gateway.responses.events import ResponseAnswer
from gateway.responses.ids import new_response_id
from gateway.responses.store import Readable, Response
from gateway.routes.answer import Part, answer, new_job
from gateway.routes.translated import relay_translated
from gateway.sessions import Resolved, stated
from gateway.translating import ResponseAsked
from gateway.whole_answers import sent
from runtime import telemetry

log = telemetry.logger("gateway.responses")
_LIMIT, _MOST = 20, 100
_JSON = {"Content-Type": "application/json; charset=utf-8"}


async def create(request: web.Request) -> web.StreamResponse:
    """One turn: streamed, whole, or in the background."""
    caller = caller_of(request)
    asked, previous_session = await read_response(request, caller)
    try:
        turn = _Turn(request, caller, asked, previous_session)
        return await (turn.in_background() if asked.background else turn.answered())
    except RequestError as e:
        raise renamed(e, OF_RESPONSES) from None


class _Turn:
    """One response that is made."""

    def __init__(
        self, request: web.Request, caller: Caller, asked: ResponseAsked, previous_session: str | None
    ) -> None:
        self._request, self._caller, self._asked, self._parts = request, caller, asked, request.app[PARTS]
        inner = asked.asked
        named = stated(request.headers, inner.session_id, inner.prompt_cache_key, inner.said.session_id)
        history = inner.history if isinstance(inner, Relayed) else inner.prompts[0].history
        self._session: Resolved = self._parts.sessions.resolve(caller.tenant, named or previous_session, history)
        self._id = new_response_id()
        self._stores = asked.store and self._parts.responses.on
        self._created_s = self._parts.clock.wall()
        self._answering = ResponseAnswer(
            self._id,
            inner.model,
            self._created_s,
            json.loads(asked.echo) | {"store": self._stores},
            as_summary=asked.as_summary,
            with_logprobs=asked.logprobs,
        )

    async def answered(self) -> web.StreamResponse:
        """The answer, streamed or not. Raises RequestError before headers are sent."""
        inner = self._asked.asked
        if isinstance(inner, Relayed):
            reader = ChatReader(thoughts=True, splits=True)
            return await relay_translated(
                self._request, self._caller, inner, self._session, self._id, self._answering, reader, self._keep
            )
        job = new_job(self._request, inner, inner.prompts[0], self._caller, self._session, self._id)

        def ended(choice: Choice, _tokens: list[int]) -> None:
            called = [[call.name, call.arguments] for call in choice.calls]
            text = "".join(choice.text)
            self._parts.sessions.remember(
                self._session, lambda history: after_answer(history, with_calls(text, called))
            )

        part = Part(self._session, job, ended)
        return await answer(self._request, self._caller, inner, [part], self._answering, self._keep)

    async def _keep(self, choices: Sequence[Choice], usage: Usage) -> dict[str, object]:
        """Store the response before its end can be read, and hint that the results of its calls come."""
        keeper, tenant = self._parts.responses, self._caller.tenant
        if choices[0].calls:
            inner = self._asked.asked
            expect_result(self._request, self._caller, self._session.key.session_id, inner.model, inner.priority or 0)
        keeper.note(tenant, self._id, self._session.key.session_id)
        if not self._stores:
            return {}
        final = self._answering.final(choices, usage, self._parts.clock.wall())
        if self._asked.background:
            await keeper.settle(self._row(final))
        elif not await keeper.put(self._row(final)):
            self._answering.unstored()
            return {"store": False}
        return {}

    def _row(self, body: dict[str, object], runner: str = "") -> Response:
        output = body.pop("output")
        return Response(
            self._id,
            self._caller.tenant,
            self._session.key.session_id,
            str(body["status"]),
            sse.encoded(body),
            sse.encoded(output),
            self._asked.items,
            self._asked.previous,
            runner,
        )

    # ---- in the background -------------------------------------------------------------------------------------
    async def in_background(self) -> web.StreamResponse:
        """The response object, before the answer. Raises InvalidRequest where nothing is stored, NotFound for an
        unknown model, Unavailable when it cannot be stored or held, RateLimited when too many calls wait."""
        keeper = self._parts.responses
        if not keeper.on:
            raise InvalidRequest(
                "background: this server stores no responses; leave it out and read the answer, or its stream",
                param="background",
                code="unsupported_parameter",
            )
        check_model(self._parts.fleet, self._asked.asked.model or self._parts.config.served_model)
        queued = self._answering.response("queued")
        told = sse.encoded(queued)
        with self._parts.bodies.sending(self._caller.tenant, len(told)):
            runs = False
            try:
                runs = await keeper.run(self._row(dict(queued), keeper.runner), self._run)
            finally:
                self._request[OUTLIVES] = runs  # else nobody would release its body
            if not runs:
                raise Unavailable("responses cannot be stored at the moment; try again")
            keeper.note(self._caller.tenant, self._id, self._session.key.session_id)
            headers = {"X-Session-Id": self._session.key.session_id, HEADER: shown(labelled(self._request, self._id))}
            return await sent(self._request, told, headers | _JSON, closes=self._parts.draining)

    async def _run(self) -> None:
        """Compute it, and store what has become of it."""
        try:
            await self.answered()
        except RequestError as e:
            failed = self._answering.failure(renamed(e, OF_RESPONSES))
            await self._parts.responses.settle(self._row(failed))
        except Exception:
            log.exception("a response in the background failed", response=self._id)
            failed = self._answering.failure(Unavailable("internal error"))
            await self._parts.responses.settle(self._row(failed))
        finally:
            self._parts.bodies.release(self._request)


# ---- stored responses ------------------------------------------------------------------------------------------------
async def _stored(request: web.Request) -> Readable:
    return await request.app[PARTS].responses.get(query_caller_of(request).tenant, request.match_info["response_id"])


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json", charset="utf-8")


async def show(request: web.Request) -> web.Response:
    """A stored response, also one that still runs in the background."""
    response = await _stored(request)
    if request.query.get("stream", "false") not in ("false", "0"):
        raise InvalidRequest(
            "stream: a stored response cannot be streamed again; read it without", param="stream",
            code="unsupported_parameter",
        )  # fmt: skip
    return _json(response.shown())


async def input_items(request: web.Request) -> web.Response:
    """The items of a stored response's input, latest first, a page at a time."""
    query, response_id = request.query, request.match_info["response_id"]
    order, limit = query.get("order", "desc"), query.get("limit", str(_LIMIT))
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc", param="order")
    if not (re.fullmatch("[0-9]{1,3}", limit) and 1 <= int(limit) <= _MOST):
        raise InvalidRequest(f"limit must be an integer from 1 to {_MOST}", param="limit")
    try:
        page, more = await request.app[PARTS].responses.input_page(
            query_caller_of(request).tenant, response_id, query.get("after"), int(limit), latest_first=order == "desc"
        )
    except KeyError:
        raise InvalidRequest("after names no item of this response", param="after") from None
    ends = (page[0][0], page[-1][0]) if page else (None, None)
    rest = sse.encoded({"has_more": more, "first_id": ends[0], "last_id": ends[1]})
    return _json(b'{"object":"list","data":[' + b",".join(item for _, item in page) + b"]," + rest[1:])


async def delete(request: web.Request) -> web.Response:
    """Delete a stored response; one in the background stops."""
    response_id = request.match_info["response_id"]
    await request.app[PARTS].responses.delete(query_caller_of(request).tenant, response_id)
    return web.json_response({"id": response_id, "object": "response", "deleted": True})


async def cancel(request: web.Request) -> web.Response:
    """Stop a response in the background."""
    keeper = request.app[PARTS].responses
    response = await keeper.cancel(query_caller_of(request).tenant, request.match_info["response_id"])
    return _json(response.shown())
