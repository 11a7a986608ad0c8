"""Pages of a tenant's sessions, most recently used first or by id, at a cost that does not grow with their number.

By id, a page may begin after any id, known or not, and the pages together contain every session that existed
throughout. By last use the order changes between pages: a page begins where `after` is now, and a session used
meanwhile may be missed.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from itertools import islice, repeat

from contracts.ids import SessionKey

#: Most entries of a block: more are split in two.
_BLOCK = 2048
#: A session's place: 0 or minus its last use, then its id.
Place = tuple[float, str]


class Ordered:
    """Distinct places in order, in blocks, so that a change moves one block and not all places."""

    def __init__(self) -> None:
        self._blocks: list[list[Place]] = []
        self._last: list[Place] = []  #: the last place of each block

    def add(self, place: Place) -> None:
        """Insert a place that is not there."""
        if not self._blocks:
            self._blocks.append([place])
            self._last.append(place)
            return
        at = min(bisect_left(self._last, place), len(self._last) - 1)
        block = self._blocks[at]
        insort(block, place)
        if len(block) > _BLOCK:
            half = len(block) // 2
            self._blocks[at : at + 1] = [block[:half], block[half:]]
            self._last[at : at + 1] = [block[half - 1], block[-1]]
        else:
            self._last[at] = block[-1]

    def remove(self, place: Place) -> None:
        """Remove a place that is there."""
        at = bisect_left(self._last, place)
        block = self._blocks[at]
        del block[bisect_left(block, place)]
        if block:
            self._last[at] = block[-1]
        else:
            del self._blocks[at], self._last[at]

    def after(self, place: Place | None) -> Iterator[Place]:
        """Places behind this one, which need not be there, in order; None: all. Must not change meanwhile."""
        first = bisect_right(self._last, place) if place is not None else 0
        for number, block in enumerate(self._blocks[first:]):
            start = bisect_right(block, place) if place is not None and not number else 0
            yield from islice(block, start, None)

    def __iter__(self) -> Iterator[Place]:
        return self.after(None)


class Listing:
    """The places of all sessions, by tenant and order."""

    def __init__(self) -> None:
        self._by_id: dict[str, Ordered] = {}
        self._by_use: dict[str, Ordered] = {}

    def add(self, key: SessionKey, last_use_s: float) -> None:
        """A session is known."""
        self._by_id.setdefault(key.tenant, Ordered()).add((0.0, key.session_id))
        self._by_use.setdefault(key.tenant, Ordered()).add((-last_use_s, key.session_id))

    def used(self, key: SessionKey, before_s: float, last_use_s: float) -> None:
        """Its last use has changed."""
        if before_s != last_use_s:
            self._by_use[key.tenant].remove((-before_s, key.session_id))
            self._by_use[key.tenant].add((-last_use_s, key.session_id))

    def remove(self, key: SessionKey, last_use_s: float) -> None:
        """It is forgotten."""
        self._by_id[key.tenant].remove((0.0, key.session_id))
        self._by_use[key.tenant].remove((-last_use_s, key.session_id))

    def page(self, tenant: str, limit: int, after: Place | None, *, by_id: bool) -> list[SessionKey]:
        """At most `limit` sessions behind a place. tenant: empty for all tenants, and then without a place."""
        orders = self._by_id if by_id else self._by_use
        if tenant:
            found = orders[tenant].after(after) if tenant in orders else iter(())
            return [SessionKey(tenant, ident) for _, ident in islice(found, limit)]
        every = heapq.merge(*(zip(places, repeat(name), strict=False) for name, places in orders.items()))
        return [SessionKey(name, ident) for (_, ident), name in islice(every, limit)]

    def validate(self, sessions: dict[SessionKey, float]) -> None:
        """Raise AssertionError when the places are not those of these sessions (key to last use), in order."""
        by_id = [(key.tenant, 0.0, key.session_id) for key in sessions]
        by_use = [(key.tenant, -last_use_s, key.session_id) for key, last_use_s in sessions.items()]
        for orders, expected in ((self._by_id, by_id), (self._by_use, by_use)):
            assert [(name, *place) for name in sorted(orders) for place in orders[name]] == sorted(expected)
