"""Which request is answered next when as many are being answered as may be.

Every tenant gets at most its share of the slots. What finds none waits, and each slot that becomes free goes to the waiting tenant that
holds the fewest for its weight (weighted max-min fairness): tenants who all have more to do than slots hold them in proportion to their
weights, however long their requests take and however many of them wait. Equal ones take turns in proportion to their weights
(virtual time, as in start-time fair queueing), so that this holds for few slots too and no tenant waits for ever. Of a tenant's own
requests the most urgent goes first, then the oldest.

How long a request waits is bounded by whoever waits for it (`gateway.slots`).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from contracts.errors import IllegalTransition
from gateway.core.shares import Shares


@dataclass(slots=True, order=True)
class Place:
    """One request's. waiting → held → gone, or waiting → gone."""

    #: What places of one tenant are ordered by.
    priority: int
    number: int
    tenant: str = field(compare=False)
    state: Literal["waiting", "held", "gone"] = field(compare=False)


class Slots:
    """Invariants: no waiting request could be let in; a tenant is in `_waiting` while some request of it waits, its places in order."""

    def __init__(self, limit: int, queue: int, share: float, weight_of: Callable[[str], float]) -> None:
        """limit: slots. queue: how many may wait. share: of both, for one tenant. weight_of: a tenant's, above 0."""
        self.held, self.queued = Shares(limit, share), Shares(queue, share)
        self._weight_of = weight_of
        self._waiting: dict[str, list[Place]] = {}
        #: Virtual time, and when a tenant's next turn is: each turn takes it 1 / weight.
        self._now = 0.0
        self._due: dict[str, float] = {}
        self._places = 0

    def ask(self, tenant: str, priority: int) -> Place | None:
        """A place that is held at once, or waits; None when as many wait as may."""
        self._places += 1
        if self.held.take(tenant):
            self._turn(tenant)
            return Place(priority, self._places, tenant, "held")
        if not self.queued.take(tenant):
            return None
        place = Place(priority, self._places, tenant, "waiting")
        insort(self._waiting.setdefault(tenant, []), place)
        return place

    def leave(self, place: Place) -> list[Place]:
        """It has ended, or waits no longer. Returns the places that are held now instead. Raises IllegalTransition when it has left."""
        if place.state == "gone":
            raise IllegalTransition(f"a request of {place.tenant} left its place twice")
        if place.state == "waiting":
            self._unqueue(place)
            place.state = "gone"
            return []
        place.state = "gone"
        self.held.give(place.tenant)
        let_in = []
        while (tenant := self._next()) is not None:
            chosen = self._waiting[tenant][0]
            self._unqueue(chosen)
            self.held.take(tenant)
            self._turn(tenant)
            chosen.state = "held"
            let_in.append(chosen)
        return let_in

    def _next(self) -> str | None:
        if self.held.held >= self.held.limit:
            return None
        able = [tenant for tenant in self._waiting if self.held.of(tenant) < self.held.most]
        return min(able, key=self._rank, default=None)

    def _rank(self, tenant: str) -> tuple[float, float, int]:
        return self.held.of(tenant) / self._weight_of(tenant), self._due.get(tenant, 0.0), self._waiting[tenant][0].number

    def _turn(self, tenant: str) -> None:
        # A tenant that asked for nothing for a while has not saved turns.
        self._now = max(self._now, self._due.get(tenant, 0.0))
        self._due[tenant] = self._now + 1 / self._weight_of(tenant)

    def _unqueue(self, place: Place) -> None:
        places = self._waiting[place.tenant]
        places.remove(place)
        self.queued.give(place.tenant)
        if not places:
            del self._waiting[place.tenant]

    def validate(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        self.held.validate()
        self.queued.validate()
        assert self._next() is None, "somebody waits for nothing"
        assert sum(map(len, self._waiting.values())) == self.queued.held
        assert all(self._waiting.values())
        for tenant, places in self._waiting.items():
            assert places == sorted(places) and len(places) == self.queued.of(tenant)
            assert all(p.tenant == tenant and p.state == "waiting" for p in places)
