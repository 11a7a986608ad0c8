"""Answers a translated request by an engine with HTTP of its own: a chat is relayed, and its answer is told in the
caller's format. Sessions, limits, hints, times and metrics are those of a relayed chat (`routes.relayed`)."""

from __future__ import annotations

import contextlib
from typing import Any

from aiohttp import web
from pydantic_core import from_json

from contracts.errors import RequestError, Unavailable
from gateway import sse, timing
from gateway.answering import Answering
from gateway.core.admission import Caller
from gateway.core.bodies import Tally
from gateway.core.conversations import after
from gateway.core.relay_bodies import Relayed
from gateway.core.relay_events import Events, data_of
from gateway.openai.chat_reader import ChatReader, error_of
from gateway.routes.answer import Keep
from gateway.routes.relayed import RelayRun, relay
from gateway.sessions import Resolved
from runtime import telemetry

log = telemetry.logger("gateway.translated")


async def relay_translated(
    request: web.Request,
    caller: Caller,
    asked: Relayed,
    session: Resolved,
    request_id: str,
    answering: Answering,
    reader: ChatReader,
    keep: Keep | None = None,
) -> web.StreamResponse:
    """The engine's answer, in the caller's format. Raises RequestError before headers are sent."""

    def run(*given: Any) -> _TranslatedRun:
        return _TranslatedRun(*given, answering=answering, reader=reader, keep=keep)

    return await relay(request, caller, asked, session, request_id, run)


class _TranslatedRun(RelayRun):
    """One request being answered."""

    def __init__(self, *given: Any, answering: Answering, reader: ChatReader, keep: Keep | None) -> None:
        super().__init__(*given)
        self._answering, self._reader, self._keep = answering, reader, keep

    async def _whole(self) -> web.Response:
        body, tally = self._relay.take(), Tally()
        tally.add(body)
        await self._learn(body, tally)
        # Probabilities of 5,000 tokens take half a second.
        tenant, beside = self._job.session.tenant, self._parts.decoding.beside
        made = await beside(tenant, tally, lambda: self._translated(body))
        self._ends()
        made |= await self._kept()
        told = await beside(tenant, tally, lambda: sse.encoded(made))
        headers = {"Content-Type": "application/json; charset=utf-8"} | self._headers()
        return web.Response(body=told, headers=headers | {timing.HEADER: self._timing()})

    def _translated(self, body: bytes) -> dict[str, Any]:
        """A whole answer in the caller's format. Raises RequestError for the engine's error."""
        value = _decoded(body)
        if not self.answered:
            raise error_of(value, self._relay.status)
        self._reader.whole(value)
        return self._answering.whole([self._reader.choice], self._reader.usage)

    async def _long(self) -> web.StreamResponse:
        raise Unavailable("the engine's answer is too long to be told whole; ask for a stream")

    async def _stream(self) -> web.StreamResponse:
        answer, events = sse.EventStream(self._headers() | self._times_so_far()), Events()
        await answer.prepare(self._request)
        try:
            await answer.send(self._answering.opened(0))
            every_s = self._parts.config.gateway.comment_s
            async with (
                answer.kept_alive(every_s, lambda: "waiting"),
                contextlib.aclosing(self._relay.pieces()) as pieces,
            ):
                async for piece in pieces:
                    if (ready := events.push(piece)) and (made := self._told(ready)):
                        await answer.send(made)
            if rest := events.rest():
                answer.keep(self._told(rest))
            if not self._reading.ended:
                raise Unavailable("the engine's answer ended too early; try again")
        except RequestError as e:
            self.failure = e.status
            log.warning("stream failed", request=self._job.request_id, error=e.message)
            await answer.end(self._answering.failed(e))
        else:
            self._ends()
            answer.keep(self._answering.closed(self._reader.choice, {}))
            told = sse.comment(f"server-timing {self._timing()}") if timing.asks(self._request) else b""
            await self._kept()
            await answer.end(self._answering.ended([self._reader.choice], self._reader.usage, told))
        return answer

    def _told(self, ready: bytes) -> bytes:
        """Events for the caller. Raises RequestError for an error among the engine's."""
        self._reading.push(ready)
        if self._reading.spoken:
            self._saw_output()
        made = []
        for data in data_of(ready):
            if data != b"[DONE]":
                gained = self._reader.chunk(_decoded(data))
                made.append(self._answering.grown(0, gained, lambda: self._reader.usage))
        return b"".join(made)

    async def _kept(self) -> dict[str, Any]:
        return {} if self._keep is None else await self._keep([self._reader.choice], self._reader.usage)

    def _remember(self) -> None:
        choice = self._reader.choice
        calls = [[call.name, call.arguments] for call in choice.calls]
        self._parts.sessions.remember(
            self._session, lambda history: after("chat", history, "".join(choice.text), calls)
        )


def _decoded(data: bytes) -> dict[str, Any]:
    """Raises Unavailable for what is no JSON object."""
    try:
        value = from_json(data)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise Unavailable("the engine's answer cannot be read; try again")
    return value
