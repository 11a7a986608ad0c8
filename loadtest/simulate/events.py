"""Virtual time: calls run in order of time; at equal times, in the order in which they were scheduled."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Events:
    """A clock and its scheduled calls. Invariant: `now` never decreases."""

    def __init__(self) -> None:
        self.now = 0.0
        self.done = 0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._asked = 0

    def __len__(self) -> int:
        return len(self._due)

    def at(self, time_s: float, do: Callable[[], None]) -> None:
        """Call `do` at `time_s`, or now if that is past."""
        self._asked += 1
        heapq.heappush(self._due, (max(time_s, self.now), self._asked, do))

    def run(self, until: Callable[[], bool], limit_s: float = float("inf")) -> None:
        """Run until `until()` is true, nothing is scheduled, or the next call is after `limit_s`."""
        due = self._due
        while due and due[0][0] <= limit_s and not until():
            self.now, _, do = heapq.heappop(due)
            self.done += 1
            do()
