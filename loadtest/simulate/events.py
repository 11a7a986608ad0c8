"""Virtual time: what is due is done in order of time, and of being asked for where times are equal."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Events:
    """A clock and what is due. `now` only grows."""

    def __init__(self) -> None:
        self.now = 0.0
        self.done = 0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._asked = 0

    def __len__(self) -> int:
        return len(self._due)

    def at(self, time_s: float, do: Callable[[], None]) -> None:
        """Do this then. What is asked for the past is done now."""
        self._asked += 1
        heapq.heappush(self._due, (max(time_s, self.now), self._asked, do))

    def run(self, until: Callable[[], bool], limit_s: float = float("inf")) -> None:
        """Until `until()` is true, nothing is due, or the time is `limit_s`."""
        due = self._due
        while due and due[0][0] <= limit_s and not until():
            self.now, _, do = heapq.heappop(due)
            self.done += 1
            do()
