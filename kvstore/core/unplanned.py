"""The hints that have chunks left to plan, most urgent first."""

from __future__ import annotations

import heapq

from kvstore.core.events import LoadId
from kvstore.core.prefetch import FetchRank


class Unplanned:
    """See the module."""

    def __init__(self) -> None:
        self._ranks: dict[LoadId, FetchRank] = {}
        self._heap: list[tuple[FetchRank, LoadId]] = []  #: with entries of loads that have left

    def __contains__(self, load: LoadId) -> bool:
        return load in self._ranks

    def add(self, load: LoadId, rank: FetchRank) -> None:
        """The load has chunks left. Idempotent: a load keeps its rank."""
        if load not in self._ranks:
            self._ranks[load] = rank
            heapq.heappush(self._heap, (rank, load))

    def drop(self, load: LoadId) -> None:
        """The load has none left, or is gone. Idempotent."""
        self._ranks.pop(load, None)
        if len(self._heap) > 2 * len(self._ranks) + 64:
            self._heap = [(rank, load) for load, rank in self._ranks.items()]
            heapq.heapify(self._heap)

    def first(self) -> LoadId | None:
        """The most urgent load."""
        while self._heap and self._ranks.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None
