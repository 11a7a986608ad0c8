"""Answers a request by relaying it to an engine with HTTP of its own: the engine's answer, byte for byte, with the
gateway's headers. Sessions, limits, hints, times and metrics are those of every other answer (`routes.answer`)."""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable

from aiohttp import web

from contracts.errors import RequestError
from contracts.ids import SessionKey
from gateway import metrics, sse, timing
from gateway.attainment import TPOT, TTFT
from gateway.core.admission import Caller
from gateway.core.bodies import Tally
from gateway.core.conversations import after
from gateway.core.hops import hop_of
from gateway.core.relay_answers import Reading
from gateway.core.relay_bodies import Relayed
from gateway.core.relay_events import Events
from gateway.core.relay_headers import up
from gateway.core.relay_routes import APIS
from gateway.core.turn_times import server_timing
from gateway.entering import entered
from gateway.envelope import route_name
from gateway.generate import check_model
from gateway.inline_hints import InlineHints
from gateway.intake import pinned_node
from gateway.parts import PARTS, Parts
from gateway.relay import Relay, RelayJob
from gateway.request_ids import labelled
from gateway.sessions import Resolved, stated
from gateway.timing import ARRIVED_S
from gateway.tracing import Outcome, turn_trace
from gateway.turn_headers import turn_headers
from runtime import telemetry

log = telemetry.logger("gateway.relayed")


async def relay(
    request: web.Request,
    caller: Caller,
    asked: Relayed,
    session: Resolved | None = None,
    request_id: str = "",
    made_run: Callable[[web.Request, Parts, Caller, RelayJob, Resolved], RelayRun] | None = None,
) -> web.StreamResponse:
    """The engine's answer. session, request_id: unless they are to be found here. made_run: tells the answer in another
    format. Raises RequestError before headers are sent."""
    parts, session = request.app[PARTS], session or _session(request, caller, asked)
    job = _job(request, caller, asked, session, request_id)
    async with entered(request, caller.tenant, job.priority, asked.estimate) as used:
        inline = InlineHints(request, caller, asked.said, session.key.session_id, job.model, job.priority)
        run = (made_run or RelayRun)(request, parts, caller, job, session)
        inline.tell(after=False)
        try:
            return await run.answer()
        except RequestError as e:
            run.failure = e.status
            raise
        finally:
            used.tokens = run.end()
            if job.trace is not None:
                now = parts.clock.now()
                job.trace.end(request, job.request_id, job.session, job.model, run.outcome(), now)
            if run.answered:
                inline.tell(after=True)


def _session(request: web.Request, caller: Caller, asked: Relayed) -> Resolved:
    """The session of a turn. A call that belongs to no session, or whose conversation cannot be read, gets a name that
    no other has, so that it may run anywhere."""
    if APIS[asked.kind].turn:
        named = stated(request.headers, asked.session_id, asked.prompt_cache_key, asked.said.session_id)
        if named is not None or asked.history is not None:
            return request.app[PARTS].sessions.resolve(caller.tenant, named, asked.history)
    return Resolved(SessionKey(caller.tenant, f"one-{secrets.token_hex(12)}"))


def _job(request: web.Request, caller: Caller, asked: Relayed, session: Resolved, request_id: str) -> RelayJob:
    """Raises what `check_model`, `pinned_node`, `hop_of` and `up` raise."""
    parts = request.app[PARTS]
    model = asked.model or parts.config.served_model
    check_model(parts.fleet, model)
    model = parts.fleet.base_of(model)
    return RelayJob(
        request_id=labelled(request, request_id or secrets.token_hex(12)),
        session=session.key,
        asked=asked,
        model=model,
        headers=up(request.headers.items()),
        arrived_s=request[ARRIVED_S],
        priority=caller.priority(asked.priority if asked.priority is not None else asked.said.priority or 0),
        pin=pinned_node(request, caller, parts, model),
        hop=hop_of(request.headers, session.key.session_id) if APIS[asked.kind].turn else None,
        cache_salt=session.scope(asked.user, asked.cache_salt, per_user=parts.config.gateway.per_user(caller.tenant)),
        trace=turn_trace(request, caller.tenant, request[ARRIVED_S]),
    )


class RelayRun:
    """One request being answered."""

    def __init__(self, request: web.Request, parts: Parts, caller: Caller, job: RelayJob, session: Resolved) -> None:
        self._request, self._parts, self._caller, self._job, self._session = request, parts, caller, job, session
        self._kind, self._api = job.asked.kind, APIS[job.asked.kind]
        self._relay = Relay(parts.generator, job, self._hold)
        self._reading = Reading(self._kind, keeps=session.history is not None)
        self._first_s: float | None = None
        self._last_s = job.arrived_s
        self._remembered = False
        #: Status of the error that ended it, if any. Without a stream nothing is known of its first token.
        self.failure = 0
        timed = job.asked.streams and self._api.counted
        targets = parts.fleet.targets(job.model) if timed else {}
        self._attained = parts.attainments.answer(job.model, targets)

    @property
    def answered(self) -> bool:
        """Whether the engine has accepted the request."""
        return 0 < self._relay.status < 400

    async def answer(self) -> web.StreamResponse:
        """The whole answer, streamed or not."""
        await self._relay.begin()
        self._parts.generator.running += 1
        try:
            if self._relay.events:
                return await self._stream()
            return await (self._whole() if self._relay.complete else self._long())
        finally:
            self._parts.generator.running -= 1

    def end(self) -> int:
        """Cancel what still runs, and log the request. Returns the tokens that it has used."""
        self._relay.cancel()
        status = self.failure or self._relay.status
        if not 400 <= status < 500:
            self._attained.stopped(self._parts.clock.now() - self._job.arrived_s, failed=status >= 500)
        if not self._relay.status:
            return self._job.asked.estimate if self._relay.taken else 0
        if not self.answered:
            log.info("refused by the engine", request=self._job.request_id, status=self._relay.status)
            return 0
        if not self._api.counted:
            return 0
        prompt_tokens = self._reading.prompt_tokens(self._job.asked.estimate)
        self._log(prompt_tokens)
        if self._api.turn:
            progress = self._relay.progress
            timing.observe(self._job.model, progress.times)
            self._parts.turn_reports.note(self._job.session, progress)
        return prompt_tokens + self._reading.completion_tokens

    def outcome(self) -> Outcome:
        """For the request's trace."""
        reading, progress = self._reading, self._relay.progress
        cached_tokens = reading.stated.cached_tokens if reading.stated is not None else 0
        prompt_tokens = reading.prompt_tokens(self._job.asked.estimate) if self.answered else 0
        status = self.failure or (self._relay.status if self._relay.status >= 400 else 0)
        return Outcome(progress.times, progress.node, status, prompt_tokens, cached_tokens, reading.completion_tokens)

    # ---- answers -----------------------------------------------------------------------------------------------
    async def _whole(self) -> web.Response:
        """A large answer waits for a helper to be read; it is sent before, unless it names the next turn's session."""
        body, tally = self._relay.take(), Tally()
        tally.add(body)
        reads_first = tally.light or self._reading.keeps
        if reads_first:
            await self._learn(body, tally)
        self._ends()
        headers = self._relay.headers | self._headers() | {timing.HEADER: self._timing()}
        answer = web.Response(status=self._relay.status, body=body, headers=headers)
        if not reads_first:
            try:
                await answer.prepare(self._request)
                await answer.write_eof()
            finally:
                await self._learn(body, tally)
        return answer

    async def _learn(self, body: bytes, tally: Tally) -> None:
        """Read a whole answer. If that fails, it counts by its length, also when the caller leaves meanwhile."""
        if not self.answered or not self._api.counted:
            return
        self._saw_output()
        try:
            self._reading = await self._parts.decoding.read(self._job.session.tenant, self._reading, body, tally)
        except BaseException as e:
            self._unread(len(body))
            if not isinstance(e, RequestError):
                raise

    async def _stream(self) -> web.StreamResponse:
        answer, events = sse.EventStream(self._relay.headers | self._headers() | self._times_so_far()), Events()
        answer.set_status(self._relay.status)
        await answer.prepare(self._request)
        try:
            async with contextlib.aclosing(self._relay.pieces()) as pieces:
                async for piece in pieces:
                    if ready := self._read(events.push(piece), events.torn):
                        await answer.send(ready)
        except RequestError as e:
            self.failure = e.status
            log.warning("stream failed", request=self._job.request_id, error=e.message)
            await answer.end((b"\n\n" if events.torn else b"") + sse.failure(e, self._request.path))
        else:
            self._ends()
            await answer.end(events.rest())
        return answer

    async def _long(self) -> web.StreamResponse:
        """An answer in one body that is too long to be held. When it breaks off, so does the connection, because the
        caller has a part of it."""
        answer = web.StreamResponse(
            status=self._relay.status, headers=self._relay.headers | self._headers() | self._times_so_far()
        )
        await answer.prepare(self._request)
        try:
            async with contextlib.aclosing(self._relay.pieces()) as pieces:
                async for piece in pieces:
                    self._unread(len(piece))
                    await answer.write(piece)
        except RequestError as e:
            log.warning("an answer broke off", request=self._job.request_id, error=e.message)
            if self._request.transport is not None:
                self._request.transport.abort()
            return answer
        self._ends()
        await answer.write_eof()
        return answer

    # ---- what is known of it -----------------------------------------------------------------------------------
    def _read(self, ready: bytes, torn: bool) -> bytes:
        """What is to be sent for these events."""
        if torn:
            self._reading.unread(len(ready))
        elif ready:
            self._reading.push(ready)
        if ready and self._reading.spoken:
            self._saw_output()
        if self._reading.ended and not self._remembered:
            self._ends()
            if timing.asks(self._request):
                return sse.comment(f"server-timing {self._timing()}") + ready
        return ready

    def _unread(self, length: int) -> None:
        if self._api.turn:
            self._reading.unread(length)

    def _saw_output(self) -> None:
        now = self._last_s = self._parts.clock.now()
        if self._first_s is None:
            self._first_s = now
            self._relay.progress.times.spoke(None, now)
            if self._relay.events:
                waited_s = now - self._job.arrived_s
                metrics.child(metrics.TTFT, route_name(self._request), self._job.model).observe(waited_s)
                self._attained.took(TTFT, waited_s)

    def _ends(self) -> None:
        """The answer is complete. Noted before the caller can read its end and send the next turn."""
        if self._remembered or not self.answered:
            return
        self._remembered = True
        times = self._relay.progress.times
        if times.spoken and self._relay.events:
            times.ended(None, self._parts.clock.now())
        if self._job.hop is not None:
            self._parts.generator.ended.note(self._job.session.tenant, self._job.hop, self._job.request_id)
        self._remember()

    def _remember(self) -> None:
        """Note how the conversation ended."""
        reading, turn = self._reading, self._reading.turn
        if turn is not None:
            self._parts.sessions.remember(
                self._session, lambda history: after(self._kind, history, turn, reading.calls)
            )

    def _log(self, prompt_tokens: int) -> None:
        reading, progress, job = self._reading, self._relay.progress, self._job
        cached_tokens = reading.stated.cached_tokens if reading.stated is not None else 0
        completion_tokens = reading.completion_tokens
        if log.is_enabled_for(logging.INFO):
            log.info(
                "answered",
                request=job.request_id,
                session=str(job.session),
                node=progress.node,
                prompt_tokens=prompt_tokens,
                cached_tokens=cached_tokens,
                completion_tokens=completion_tokens,
                ttft_s=round((self._first_s or self._last_s) - job.arrived_s, 4),
                total_s=round(self._parts.clock.now() - job.arrived_s, 4),
            )
        for kind, tokens in (("prompt", prompt_tokens), ("cached", cached_tokens), ("completion", completion_tokens)):
            metrics.child(metrics.TOKENS, kind, job.model).inc(tokens)
        if self._relay.events and self._first_s is not None and completion_tokens > 1:
            token_s = (self._last_s - self._first_s) / (completion_tokens - 1)
            metrics.child(metrics.TPOT, route_name(self._request), job.model).observe(token_s)
            self._attained.took(TPOT, token_s)

    def _hold(self, amount: int) -> bool:
        try:
            self._parts.bodies.hold(self._request, amount)
        except RequestError:
            return False
        return True

    def _headers(self) -> dict[str, str]:
        session_id = self._job.session.session_id if self._api.turn else None
        return turn_headers(self._caller, session_id, self._job.request_id, self._relay.progress)

    def _times_so_far(self) -> dict[str, str]:
        return {timing.HEADER: server_timing(self._relay.progress.times.so_far(self._parts.clock.now()))}

    def _timing(self) -> str:
        """The complete `Server-Timing` of a finished answer."""
        times = self._relay.progress.times
        return server_timing(times.whole(), self._parts.clock.now() - times.arrived_s)
