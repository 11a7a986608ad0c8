"""Whether one more request may wait for admission, and which one a full queue refuses instead.

The tenant with the most waiting requests for its weight loses its latest one to a tenant with fewer. A decision is
linear in tenants and priorities, not in the length of the queue, so a flood does not delay the engine's thread.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Generic

from worker.core.fairness import Asked, S


class Queue(Generic[S]):
    """The queue between two turns. Invariants: `_all` counts waiting requests by priority; `_fresh` holds those without
    any output, by tenant, sorted by (priority, arrival)."""

    def __init__(self, waiting: Iterable[S], is_fresh: Callable[[S], bool], most: int) -> None:
        """is_fresh: whether nothing was sent yet, so it can be refused. most: limit per priority, counting more urgent
        ones; twice as many in all."""
        self._most = most
        self._all: Counter[int] = Counter()
        self._fresh: dict[str, list[tuple[int, int, S]]] = defaultdict(list)
        self._weights: dict[str, float] = {}
        for s in waiting:
            self._all[s.request.priority] += 1
            if is_fresh(s):
                self._fresh[s.request.tenant].append((s.request.priority, s.arrival, s))
                self._weights[s.request.tenant] = s.request.weight
        for entries in self._fresh.values():
            entries.sort(key=_place)

    def joined(self, s: S) -> None:
        """Add a new request."""
        self._all[s.request.priority] += 1
        insort(self._fresh[s.request.tenant], (s.request.priority, s.arrival, s), key=_place)
        self._weights[s.request.tenant] = s.request.weight

    def left(self, s: S) -> None:
        """Remove a request; does nothing if it is not in the queue."""
        entries = self._fresh.get(s.request.tenant, [])
        at = bisect_right(entries, (s.request.priority, s.arrival), key=_place) - 1
        if at >= 0 and entries[at][2] is s:
            del entries[at]
            self._all[s.request.priority] -= 1
            if not entries:
                del self._fresh[s.request.tenant]

    def way(self, newcomer: Asked) -> S | bool:
        """Whether the newcomer may wait: True, False, or the request to refuse instead."""
        priority = newcomer.priority
        if sum(count for at, count in self._all.items() if at <= priority) >= self._most:
            counts = {
                tenant: bisect_right(entries, priority, key=lambda entry: entry[0])
                for tenant, entries in self._fresh.items()
            }
            tenant = _heaviest({t: count for t, count in counts.items() if count}, self._weights, newcomer)
            return self._fresh[tenant][counts[tenant] - 1][2] if tenant is not None else False
        if self._all.total() >= 2 * self._most:
            last = max((entries[-1] for entries in self._fresh.values()), key=_place, default=None)
            return last[2] if last is not None and last[0] > priority else False
        return True


def _place(entry: tuple[int, int, object]) -> tuple[int, int]:
    return entry[:2]


def _heaviest(count: Mapping[str, int], weights: Mapping[str, float], newcomer: Asked) -> str | None:
    """The tenant with the most waiting for its weight, if without one it still has at least as many as the newcomer's
    tenant will have; else None."""
    weight = {**weights, newcomer.tenant: newcomer.weight}
    most = max(count, key=lambda tenant: (count[tenant] / weight[tenant], tenant), default=newcomer.tenant)
    joined = (count.get(newcomer.tenant, 0) + 1) / newcomer.weight
    return None if most == newcomer.tenant or joined > (count[most] - 1) / weight[most] else most
