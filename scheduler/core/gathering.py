"""Decides whether a scheduler that has just started knows enough of its fleet to place turns.

Nodes reconnect within a second or two. Until then the first of them would get every turn, so the scheduler declines,
and gateways ask another scheduler or choose a node themselves.
"""

from __future__ import annotations

from scheduler.core.fleet import Fleet

#: Longest time to wait for the fleet, in seconds.
GATHER_S = 2.0


class Gathering:
    """Lasts from the process's start until `expected` devices serve or `GATHER_S` has passed. It never resumes."""

    def __init__(self, began_s: float) -> None:
        self._began_s, self._over = began_s, False

    def lasts(self, now: float, fleet: Fleet, expected: int) -> bool:
        """Whether the scheduler is still gathering `expected` devices. Mutates: the end is remembered."""
        self._over = self._over or now - self._began_s > GATHER_S or fleet.serving >= expected
        return not self._over
