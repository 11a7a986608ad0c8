"""Where the turn of an advised session goes without another question: where its hint's scheduler said, as long as that is fresh and fair.

A hint has chosen a node already, and the session's cache is on its way there; to ask again costs as much as the rest of the gateway does.
So what the scheduler answered to the hint is kept for a moment, used once, and the scheduler is told of it afterwards. It is asked all the
same when the answer is old, when the node does not serve, or when that has clearly more to do than another: the choice may differ by now.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from contracts.ids import SessionKey
from gateway.core.routing import BUSIER, FleetView, Route, load

#: How long an answer is fresh: a page repeats its hint every four seconds while somebody types.
FRESH_S = 5.0
_KEPT = 50_000


@dataclass(frozen=True, slots=True)
class _Promise:
    route: Route
    heard_s: float


class Promises:
    """By session; the latest of them. Invariant: at most `_KEPT`."""

    def __init__(self) -> None:
        self._promises: dict[SessionKey, _Promise] = {}

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

    def take(
        self,
        session: SessionKey,
        model: str,
        fleet: FleetView | None,
        in_flight: Mapping[str, int],
        connected: Collection[str],
        now_s: float,
    ) -> Route | None:
        """The route for the session's turn, which uses the promise up; None: ask. in_flight: this gateway's own requests by node."""
        promise = self._promises.pop(session, None)
        if promise is None or fleet is None or now_s - promise.heard_s > FRESH_S:
            return None
        node = fleet.node(promise.route.node)
        if node is None or not node.able(model) or node.name not in connected or node.worker_address != promise.route.worker_address:
            return None
        least = min(load(n, in_flight) for n in fleet.nodes if n.able(model))
        return promise.route if load(node, in_flight) <= least + BUSIER else None

    def validate(self) -> None:
        """Raises AssertionError when the invariant is broken."""
        assert len(self._promises) <= _KEPT
