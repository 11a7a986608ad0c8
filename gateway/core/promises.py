"""Where the turn of an advised session goes without another question: where its hint's scheduler said, as long as that is fresh and fair.

A hint has chosen a node already, and the session's cache is on its way there; to ask again costs as much as the rest of the gateway does.
So what the scheduler answered to the hint is kept for a moment, used once, and the scheduler is told of it afterwards. It is asked all the
same when the answer is old, when the node does not serve, or when that has clearly more to do than another: the choice may differ by now.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from contracts.ids import SessionKey
from gateway.core.routing import BUSIER, FleetView, Node, Route, load

#: How long an answer is fresh: a page repeats its hint every four seconds while somebody types.
FRESH_S = 5.0
#: How often all nodes are looked at for the one with the least to do, in seconds: there may be a thousand.
LOOK_S = 0.05
_KEPT = 50_000


class _Promise(NamedTuple):
    route: Route
    heard_s: float


class Own(Protocol):
    """This gateway's own requests (`gateway.workers.Workers`)."""

    @property
    def in_flight(self) -> Mapping[str, int]:
        """By node."""
        ...

    def flights_on(self, node: str) -> int | None:
        """On this node; None when there is no stream to it."""
        ...


@dataclass(slots=True)
class _Seen:
    """The fleet as it was looked at."""

    fleet: FleetView | None = None
    at_s: float = 0.0
    nodes: Mapping[str, Node] = field(default_factory=dict)
    in_flight: Mapping[str, int] = field(default_factory=dict)
    leasts: dict[str, int] = field(default_factory=dict)

    def least(self, model: str) -> int:
        """What the node with the least to do has to do, of those that serve the model."""
        if model not in self.leasts:
            self.leasts[model] = min(load(n, self.in_flight) for n in self.nodes.values() if n.able(model))
        return self.leasts[model]


class Promises:
    """By session; the latest of them. Invariant: at most `_KEPT`."""

    def __init__(self) -> None:
        self._promises: dict[SessionKey, _Promise] = {}
        self._seen = _Seen()

    def __len__(self) -> int:
        return len(self._promises)

    def note(self, session: SessionKey, route: Route | None, now_s: float) -> None:
        """What a scheduler has answered to the session's hint; None: that it wants to be asked."""
        self._promises.pop(session, None)
        if route is not None:
            self._promises[session] = _Promise(route, now_s)
            if len(self._promises) > _KEPT:
                del self._promises[next(iter(self._promises))]

    def forget(self, session: SessionKey) -> None:
        """The hint was taken back."""
        self._promises.pop(session, None)

    def take(self, session: SessionKey, model: str, fleet: FleetView | None, own: Own, now_s: float) -> Route | None:
        """The route for the session's turn, which uses the promise up; None: ask."""
        promise = self._promises.pop(session, None)
        if promise is None or fleet is None or now_s - promise.heard_s > FRESH_S:
            return None
        if fleet is not self._seen.fleet or now_s - self._seen.at_s > LOOK_S:
            self._seen = _Seen(fleet, now_s, {n.name: n for n in fleet.nodes}, own.in_flight)
        node = self._seen.nodes.get(promise.route.node)
        if node is None or not node.able(model) or node.worker_address != promise.route.worker_address:
            return None
        here = own.flights_on(node.name)
        if here is None or max(here, node.running + node.waiting) > self._seen.least(model) + BUSIER:
            return None
        return promise.route

    def validate(self) -> None:
        """Raises AssertionError when the invariant is broken."""
        assert len(self._promises) <= _KEPT
