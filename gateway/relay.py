"""The life of one relayed request: place → call → the answer's head and first bytes, and again elsewhere on failure.

Nobody can continue an engine's HTTP answer in the middle. So the head is held back until the first byte of the body is
there, and an answer that comes whole until all of it is, unless it is too long. Until then a lost worker costs its
caller time, later the answer. `core.retry` decides whether there is a next attempt, `core.quarantine` which request an
engine died of.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from functools import partial

from contracts.errors import RequestError, Unavailable
from contracts.ids import SessionKey
from contracts.turn_times import Phase
from contracts.v1 import worker_pb2 as pb
from contracts.workflow import Hop
from gateway import metrics
from gateway.attempts import Shared, Tries
from gateway.core.quarantine import Verdict
from gateway.core.relay_bodies import Relayed
from gateway.core.relay_headers import down, is_events
from gateway.core.relay_routes import APIS
from gateway.core.routing import Route
from gateway.core.turn_times import TurnTimes
from gateway.flights import Late, WorkerLost
from gateway.generate import Progress
from gateway.http_flights import HttpFailed, HttpFlight, HttpHead
from gateway.tracing import TurnTrace
from runtime import telemetry

log = telemetry.logger("gateway.relay")
#: An answer in one body is held back, and can begin again elsewhere, up to this length.
WHOLE_BYTES = 8 << 20
_Failure = HttpFailed | WorkerLost | Late


@dataclass(frozen=True, slots=True)
class RelayJob:
    """One request. asked: the relay takes its body. headers: for the engine. arrived_s: its arrival on the gateway's
    clock. pin: the node that must run it, or empty. hop: its place in an agent workflow.
    cache_salt: the scope of its KV (`core.scopes`). trace: None while traces are off."""

    request_id: str
    session: SessionKey
    asked: Relayed
    model: str
    headers: list[tuple[str, str]]
    arrived_s: float
    priority: int = 0
    pin: str = ""
    hop: Hop | None = None
    cache_salt: str = ""
    trace: TurnTrace | None = None

    @property
    def timed(self) -> bool:
        """Whether the first byte of the answer takes no longer than a first token."""
        return self.asked.streams or not APIS[self.asked.kind].turn


class Relay:
    """One request. Call `begin`, then consume `pieces` once; call `cancel` in the end, whatever happens.

    status, headers: of the answer, once `begin` has returned. complete: `take` returns the whole answer."""

    def __init__(self, shared: Shared, job: RelayJob, hold: Callable[[int], bool]) -> None:
        """hold: reserves this many bytes for body and answer instead of what was reserved before; False: there are not
        so many."""
        self._shared, self._job, self._hold = shared, job, hold
        self.progress = Progress(TurnTimes(job.arrived_s))
        self._tries = Tries(
            shared,
            job.request_id,
            job.session,
            job.model,
            job.priority,
            self.progress.times,
            pin=job.pin,
            hop=job.hop,
            trace=job.trace,
        )
        self._body, job.asked.body = job.asked.body, b""
        self._flight: HttpFlight | None = None
        self.status, self.headers = 0, dict[str, str]()
        self._pieces: list[bytes] = []
        self.complete = False

    @property
    def events(self) -> bool:
        """Whether the answer is a stream of events."""
        return is_events(self.headers)

    @property
    def taken(self) -> bool:
        """Whether an engine has the request, as far as is known."""
        return self._flight is not None and self._flight.accepted_s is not None

    def take(self) -> bytes:
        """What has come of the answer's body, which is no longer held then."""
        body = b"".join(self._pieces)
        self._pieces.clear()
        return body

    def cancel(self) -> None:
        """Cancel it in the engine: the caller reads no more. Safe to call twice."""
        if self._flight is not None:
            self._flight.cancel()

    async def begin(self) -> None:
        """Return with the beginning of a stream, or with a whole answer, or with `WHOLE_BYTES` of a longer one. Raises
        RequestError when there is none; nothing is left running then."""
        while True:
            self._check_quarantine()
            route = await self._tries.place()
            self.progress.times.enter(Phase.PREPARE, self._now())
            flight = await self._call(route)
            if isinstance(flight, WorkerLost):
                await self._tries.unreachable(flight.node)
                continue
            self._tries.took(route)
            self._flight = flight
            failure = await self._collect(flight, route)
            if failure is None:
                break
            await self._failed(failure)
        self._body = b""  # there is no other attempt
        self._hold(sum(map(len, self._pieces)))

    async def pieces(self) -> AsyncGenerator[bytes]:
        """The answer's body as it comes. Raises RequestError when it breaks off."""
        assert self._flight is not None
        while self._pieces:
            yield self._pieces.pop(0)
        self._hold(0)
        while not self.complete:
            event = await self._flight.next()
            if isinstance(event, bytes):
                yield event
            elif event is None:
                self.complete = True
            else:
                assert not isinstance(event, HttpHead), "begin took it"
                raise self._broken(event)

    # ---- one attempt -------------------------------------------------------------------------------------------
    async def _call(self, route: Route) -> HttpFlight | WorkerLost:
        job, shared = self._job, self._shared
        stream = shared.workers.stream(route.node, route.worker_address)
        connect_s = shared.retry_limits.connect_s
        return await stream.call_http(self._head(route), self._body, connect_s, timed=job.timed, pinned=bool(job.pin))

    def _head(self, route: Route) -> pb.HttpRequest:
        """The worker request of the next attempt."""
        job, asked = self._job, self._job.asked
        return pb.HttpRequest(
            request_id=self._tries.attempt_id,
            model=job.model,
            path=APIS[asked.kind].path,
            headers=[pb.HttpHeader(name=name, value=value) for name, value in job.headers],
            tenant=job.session.tenant,
            session_id=job.session.session_id,
            priority=job.priority,
            source_nodes=route.source_nodes,
            cache_salt=job.cache_salt,
            prompt_tokens=asked.estimate,
            expected_tokens=asked.said.expected_tokens or 0,
            kept_tokens=route.kept_tokens,
            trace=job.trace.wire if job.trace is not None else "",
        )

    async def _collect(self, flight: HttpFlight, route: Route) -> _Failure | None:
        """Read until the answer can be passed on; the failure if it broke off before."""
        self._pieces.clear()
        self.status, length = 0, 0
        while True:
            event = await flight.next()
            if isinstance(event, HttpHead):
                if not 200 <= event.status <= 599:
                    return self._nonsense(flight, f"an answer with the status {event.status}")
                self._begun(event, flight, route)
            elif isinstance(event, bytes):
                self._pieces.append(event)
                length += len(event)
                if self.events or length > WHOLE_BYTES or not self._hold(len(self._body) + length):
                    return None
            else:
                self.complete = event is None
                return event

    def _begun(self, head: HttpHead, flight: HttpFlight, route: Route) -> None:
        self.status, self.headers = head.status, down(head.headers)
        self._shared.fleet.served(self._job.session, route.node)
        done = self.progress
        done.times.accepted(self._now() if flight.accepted_s is None else flight.accepted_s)
        done.attempt_id, done.decided_by = flight.request_id, route.decided_by
        done.node, done.why = route.node, route.why

    def _nonsense(self, flight: HttpFlight, what: str) -> HttpFailed:
        flight.cancel()
        return HttpFailed(Unavailable(f"{flight.node} sent {what}"), ran=True)

    def _check_quarantine(self) -> None:
        """Raises InvalidRequest for a request that is refused as poisonous."""
        try:
            self._shared.quarantine.check_digest(self._job.session.tenant, self._job.asked.digest, self._now())
        except RequestError:
            metrics.POISONOUS.labels("refused").inc()
            raise

    # ---- failure -----------------------------------------------------------------------------------------------
    async def _failed(self, failure: _Failure) -> None:
        """Return when the request is to be retried, after any pause; else raises RequestError."""
        assert self._flight is not None
        node, failures = self._flight.node, self._tries.failures
        self.cancel()
        self._flight, self.status = None, 0
        cause, reason, decide = "worker lost", f"{node} was lost", partial(failures.lost, ran=False)
        self._accuse(failure, node)
        if isinstance(failure, HttpFailed):
            if failure.error.status < 500:
                raise failure.error
            cause, reason = "worker failed", failure.error.message
            decide = partial(failures.lost, ran=failure.ran)
        elif isinstance(failure, Late):
            cause, reason, decide = "late", failure.reason, partial(failures.lost, ran=True)
        elif failure.verdict is not Verdict.INNOCENT:
            decide = partial(failures.lost, ran=True)
        log.warning(cause, request=self._job.request_id, node=node, reason=reason)
        await self._tries.again(decide(node, self._now(), reason), cause)

    def _broken(self, failure: _Failure) -> RequestError:
        """The error for a caller who has a part of the answer."""
        assert self._flight is not None
        node = self._flight.node
        try:
            self._accuse(failure, node)
        except RequestError as e:
            return e
        if self._shared.stopping:
            return Unavailable("this gateway is stopping; try again")
        if isinstance(failure, HttpFailed):
            return failure.error
        reason = failure.reason if isinstance(failure, Late) else f"{node} was lost"
        return Unavailable(f"{reason}, and its answer cannot be continued; try again")

    def _accuse(self, failure: _Failure, node: str) -> None:
        """Note that an engine died of this request, perhaps. Raises InvalidRequest when that was the second time."""
        if not self._alone(failure, node):
            return
        job = self._job
        refusal = self._shared.quarantine.accuse(job.session.tenant, job.asked.digest, self._now())
        if refusal is not None:
            log.error("poisonous request", request=job.request_id, tenant=job.session.tenant, node=node)
            metrics.POISONOUS.labels("found").inc()
            raise refusal

    def _alone(self, failure: _Failure, node: str) -> bool:
        """Whether an engine ended that had this request and no other one, of any gateway."""
        if isinstance(failure, HttpFailed):
            return failure.ran and failure.only and failure.error.status >= 500
        if isinstance(failure, Late) or failure.verdict is Verdict.INNOCENT or failure.hung or not failure.only:
            return False
        view = self._shared.fleet.view
        known = view.node(node) if view is not None else None
        return known is None or known.running + known.waiting <= 1

    def _now(self) -> float:
        return self._shared.clock.now()
