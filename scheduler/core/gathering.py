"""Whether a scheduler that has just started knows enough of its fleet to place turns.

All that it knows is told by the nodes as they find it again, within a second or two. The first to do so would get every turn until
the next one has, so that those who ask are told to go elsewhere meanwhile: to another scheduler, or straight to the nodes.
"""

from __future__ import annotations

from scheduler.core.fleet import Fleet

#: No longer than this, in seconds: then whoever is here is the fleet.
GATHER_S = 2.0


class Gathering:
    """Begins with the process, ends once, when as many devices serve as are expected or when the time is up."""

    def __init__(self, began_s: float, expected: int) -> None:
        self._began_s, self._expected, self._over = began_s, expected, False

    def lasts(self, now: float, fleet: Fleet) -> bool:
        """It is not over yet."""
        self._over = self._over or now - self._began_s > GATHER_S or fleet.serving >= self._expected
        return not self._over
