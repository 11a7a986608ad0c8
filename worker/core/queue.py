"""Whether one more request may wait to be admitted, and who leaves a full queue for it.

A tenant with many waiting gives up its youngest for one with few, each counted by weight. A decision costs no more than there are
tenants and priorities in the queue, however long it is: a flood must not hold up the engine's thread.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Generic

from worker.core.fairness import Asked, S


class Queue(Generic[S]):
    """As of now. Invariants: `_all` counts who waits by priority; of those of whom nothing was heard yet, `_fresh` has each tenant's by
    (priority, arrival)."""

    def __init__(self, waiting: Iterable[S], is_fresh: Callable[[S], bool], most: int) -> None:
        """is_fresh: nothing of it was sent yet, so that it can be refused. most: of one priority or more urgent; twice as many in all."""
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
        """It waits from now on, and nothing was heard of it yet."""
        self._all[s.request.priority] += 1
        insort(self._fresh[s.request.tenant], (s.request.priority, s.arrival, s), key=_place)
        self._weights[s.request.tenant] = s.request.weight

    def left(self, s: S) -> None:
        """It waits no longer; does nothing for one that is not here."""
        entries = self._fresh.get(s.request.tenant, [])
        at = bisect_right(entries, (s.request.priority, s.arrival), key=_place) - 1
        if at >= 0 and entries[at][2] is s:
            del entries[at]
            self._all[s.request.priority] -= 1
            if not entries:
                del self._fresh[s.request.tenant]

    def way(self, newcomer: Asked) -> S | bool:
        """Whether one more may wait: True, False, or when the one that is returned is refused instead."""
        priority = newcomer.priority
        if sum(count for at, count in self._all.items() if at <= priority) >= self._most:
            counts = {tenant: bisect_right(entries, priority, key=lambda entry: entry[0]) for tenant, entries in self._fresh.items()}
            tenant = _heaviest({t: count for t, count in counts.items() if count}, self._weights, newcomer)
            return self._fresh[tenant][counts[tenant] - 1][2] if tenant is not None else False
        if self._all.total() >= 2 * self._most:
            last = max((entries[-1] for entries in self._fresh.values()), key=_place, default=None)
            return last[2] if last is not None and last[0] > priority else False
        return True


def _place(entry: tuple[int, int, object]) -> tuple[int, int]:
    return entry[:2]


def _heaviest(count: Mapping[str, int], weights: Mapping[str, float], newcomer: Asked) -> str | None:
    """The tenant that has the most waiting for its weight, if it still has no fewer than the newcomer's would have when it gives up one."""
    weight = {**weights, newcomer.tenant: newcomer.weight}
    most = max(count, key=lambda tenant: (count[tenant] / weight[tenant], tenant), default=newcomer.tenant)
    joined = (count.get(newcomer.tenant, 0) + 1) / newcomer.weight
    return None if most == newcomer.tenant or joined > (count[most] - 1) / weight[most] else most
