"""Decides when a hinted session's turn is routed by its route hint, the placement with which a scheduler answered the
hint, instead of asking again.

The session's cache is being moved to the node that the hint chose, and a placement costs as much as the rest of the
gateway. So a route hint is kept for a moment and used once; the scheduler is told afterwards. The scheduler is asked
instead when the route hint is old, or when its node does not serve or is clearly busier than another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from contracts.ids import SessionKey
from contracts.placement import LEAVES_CACHE_REQUESTS
from gateway.core.routing import FleetView, NodeView, Route, load

#: How long a route hint is valid: a page repeats its hint every four seconds during typing.
FRESH_S = 5.0
#: Seconds between searches for the least loaded of all nodes, of which there may be a thousand.
LOOK_S = 0.05
_KEPT = 50_000


class _RouteHint(NamedTuple):
    route: Route
    heard_s: float


class Own(Protocol):
    """This gateway's requests by node (`gateway.workers.Workers`)."""

    @property
    def in_flight(self) -> Mapping[str, int]:
        """Requests by node."""
        ...

    def flights_on(self, node: str) -> int | None:
        """Requests on this node; None when there is no stream to it."""
        ...


@dataclass(slots=True)
class _Seen:
    """The fleet at the last look."""

    fleet: FleetView | None = None
    at_s: float = 0.0
    nodes: Mapping[str, NodeView] = field(default_factory=dict)
    in_flight: Mapping[str, int] = field(default_factory=dict)
    leasts: dict[str, int] = field(default_factory=dict)

    def least(self, model: str) -> int:
        """The smallest load of the nodes that serve the model."""
        if model not in self.leasts:
            self.leasts[model] = min(load(n, self.in_flight) for n in self.nodes.values() if n.able(model))
        return self.leasts[model]


class RouteHints:
    """The latest route hints by session. Invariant: at most `_KEPT`."""

    def __init__(self) -> None:
        self._hints: dict[SessionKey, _RouteHint] = {}
        self._seen = _Seen()

    def __len__(self) -> int:
        return len(self._hints)

    def note(self, session: SessionKey, route: Route | None, now_s: float) -> None:
        """Store the route with which a scheduler answered the session's hint; None: the scheduler wants to be asked."""
        self._hints.pop(session, None)
        if route is not None:
            self._hints[session] = _RouteHint(route, now_s)
            if len(self._hints) > _KEPT:
                del self._hints[next(iter(self._hints))]

    def forget(self, session: SessionKey) -> None:
        """The hint was withdrawn."""
        self._hints.pop(session, None)

    def take(self, session: SessionKey, model: str, fleet: FleetView | None, own: Own, now_s: float) -> Route | None:
        """The route for the session's turn, which removes the route hint; None: ask the scheduler."""
        hint = self._hints.pop(session, None)
        if hint is None or fleet is None or now_s - hint.heard_s > FRESH_S:
            return None
        if fleet is not self._seen.fleet or now_s - self._seen.at_s > LOOK_S:
            self._seen = _Seen(fleet, now_s, {n.name: n for n in fleet.nodes}, own.in_flight)
        node = self._seen.nodes.get(hint.route.node)
        if node is None or not node.able(model) or node.worker_address != hint.route.worker_address:
            return None
        here = own.flights_on(node.name)
        if here is None or max(here, node.running + node.waiting) > self._seen.least(model) + LEAVES_CACHE_REQUESTS:
            return None
        return hint.route

    def validate(self) -> None:
        """Raises AssertionError when the invariant is broken."""
        assert len(self._hints) <= _KEPT
