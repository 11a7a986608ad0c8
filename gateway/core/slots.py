"""Decides which waiting request gets the next free slot.

Every tenant gets at most its share of the slots. A free slot goes to the waiting tenant that holds the fewest for its
weight (weighted max-min fairness), so busy tenants hold slots in proportion to their weights, however long their
requests take and however many wait. Equal tenants take turns in proportion to their weights (virtual time, as in
start-time fair queueing), so this holds for few slots too and no tenant starves. Within a tenant the most urgent
request goes first, then the oldest.

`gateway.slots` bounds how long a request waits.
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
    """One request's place: waiting → held → gone, or waiting → gone."""

    #: Places of one tenant are ordered by priority, then number.
    priority: int
    number: int
    tenant: str = field(compare=False)
    state: Literal["waiting", "held", "gone"] = field(compare=False)


class Slots:
    """Slots and queue. Invariants: no waiting request could get a slot; `_waiting` has exactly the tenants with waiting
    requests, their places in order."""

    def __init__(self, limit: int, queue: int, share: float, weight_of: Callable[[str], float]) -> None:
        """limit: number of slots. queue: requests that may wait. share: one tenant's part of both. weight_of: a
        tenant's weight, above 0."""
        self.held, self.queued = Shares(limit, share), Shares(queue, share)
        self._weight_of = weight_of
        self._waiting: dict[str, list[Place]] = {}
        #: Virtual time, and when each tenant's next turn is due: a turn takes 1 / weight.
        self._now = 0.0
        self._due: dict[str, float] = {}
        self._places = 0

    def ask(self, tenant: str, priority: int) -> Place | None:
        """A place that is held or waiting; None when the queue is full."""
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
        """The request has ended, or stops waiting. Returns the places that now hold slots instead. Raises
        IllegalTransition for a place that has already left."""
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
        return (
            self.held.of(tenant) / self._weight_of(tenant),
            self._due.get(tenant, 0.0),
            self._waiting[tenant][0].number,
        )

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
        assert self._next() is None, "a request waits although a slot is free"
        assert sum(map(len, self._waiting.values())) == self.queued.held
        assert all(self._waiting.values())
        for tenant, places in self._waiting.items():
            assert places == sorted(places) and len(places) == self.queued.of(tenant)
            assert all(p.tenant == tenant and p.state == "waiting" for p in places)
