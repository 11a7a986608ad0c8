"""The attempts of one request, whatever the wire: where each is placed, and whether and when there is another.

`core.retry` decides; this is its shell. `generate` runs attempts whose answers come as frames, `relay` those whose
answers come as HTTP.
"""

from __future__ import annotations

from dataclasses import replace

from contracts.errors import RequestError, Unavailable
from contracts.ids import SessionKey
from contracts.turn_times import Phase
from contracts.workflow import Hop
from gateway import metrics
from gateway.core.hops import Ended
from gateway.core.quarantine import Quarantine
from gateway.core.refusals import is_final
from gateway.core.retry import Again, Attempts, GiveUp, RetryLimits
from gateway.core.routing import Route
from gateway.core.turn_times import TurnTimes
from gateway.fleet import Fleet
from gateway.tracing import TurnTrace
from gateway.workers import Workers
from runtime.clock import Clock


class Shared:
    """What all requests share."""

    def __init__(self, fleet: Fleet, workers: Workers, clock: Clock, retry_limits: RetryLimits) -> None:
        self.fleet, self.workers, self.clock, self.retry_limits = fleet, workers, clock, retry_limits
        self.ended = Ended()
        self.quarantine = Quarantine()
        #: Choices that are being generated, and relayed answers.
        self.running = 0
        metrics.ACTIVE.set_function(lambda: self.running)
        #: The process is ending: lost requests are not retried.
        self.stopping = False


class Tries:
    """The attempts of one request. failures: what `core.retry` knows of them. begun: attempts that a backend took."""

    def __init__(
        self,
        shared: Shared,
        request_id: str,
        session: SessionKey,
        model: str,
        priority: int,
        times: TurnTimes,
        *,
        pin: str = "",
        hop: Hop | None = None,
        trace: TurnTrace | None = None,
    ) -> None:
        """times, trace: mutated. pin: the node that must run it, or empty. hop: reported with the first placement."""
        self.shared, self.request_id, self.session, self.model = shared, request_id, session, model
        self.failures = Attempts(shared.retry_limits, pin)
        self.begun = 0
        self._priority, self._times, self._pin = priority, times, pin
        #: The hop for the next placement; None once a placement has reported it.
        self._hop = hop
        self._trace = trace

    @property
    def attempt_id(self) -> str:
        """Each attempt has its own id, so that a worker that is still ending the last attempt does not confuse them."""
        return f"{self.request_id}.r{self.begun}" if self.begun else self.request_id

    async def place(self, prefer: str = "") -> Route:
        """The route of the next attempt, after any pause. prefer: the node for the first attempt, or empty. Raises
        RequestError when the request cannot be placed."""
        fleet = self.shared.fleet
        if self.begun or self.failures.avoid:
            prefer = ""
        began_s = self.shared.clock.now()
        self._times.enter(Phase.PLACE, began_s)
        placing = self._trace.placing(began_s) if self._trace is not None else None
        while True:
            try:
                hop = self._hop and replace(self._hop, ended=self.shared.ended.take(self.session.tenant, self._hop))
                route = await fleet.place(
                    self.attempt_id,
                    self.session,
                    self.model,
                    priority=self._priority,
                    pin=self._pin or prefer,
                    avoid=self.failures.avoid,
                    hop=hop,
                    trace=placing.wire if placing is not None else "",
                )
                self._hop = None
                if placing is not None:
                    placing.ended(route, self.shared.clock.now())
                return route
            except RequestError as e:
                pin = self._pin or prefer
                if is_final(e, model_known=fleet.knows_model(self.model), pin_known=fleet.knows_node(pin)):
                    raise
                prefer = ""
                await self.again(self.failures.no_node(self.shared.clock.now(), e.message), "no node")

    def took(self, route: Route) -> None:
        """The route's node has the attempt."""
        if route.from_hint:
            trace = self._trace.wire if self._trace is not None else ""
            self.shared.fleet.taken(self.attempt_id, self.session, self.model, self._priority, route.node, trace)
        self.begun += 1

    async def unreachable(self, node: str) -> None:
        """There is no connection to the node: return after a pause. Raises Unavailable when there is no next
        attempt."""
        decision = self.failures.lost(node, self.shared.clock.now(), f"{node} cannot be reached", ran=False)
        await self.again(decision, "unreachable")

    async def again(self, decision: Again | GiveUp, cause: str) -> None:
        """Return after the pause. Raises Unavailable when there is no next attempt."""
        if self.shared.stopping:
            raise Unavailable("this gateway is stopping; try again")
        if isinstance(decision, GiveUp):
            raise Unavailable(f"the request could not be completed: {decision.reason}; try again")
        metrics.RETRIES.labels(cause).inc()
        if self._trace is not None:
            self._trace.retried(cause, self.shared.clock.now())
        if decision.pause_s:
            await self.shared.clock.sleep(decision.pause_s)
