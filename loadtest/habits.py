"""How hints go beside the requests that they announce: missed, late, early, for nothing (SYMPHONY, figures 19 and 20). Pure.

The same for loads that are planned and sent (`loadtest.variants`) and for simulated people (`loadtest.simulate.users`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

#: A spurious hint comes within so long after the request that it is drawn with.
SPURIOUS_WITHIN_S = 30.0


@dataclass(frozen=True, slots=True)
class Habits:
    """Shares of requests: missed (no hint is sent), late (`late_s` after typing began), early (`early_s` before). spurious: hints for
    nothing, a request; more than 1 is a flood. expected: whether hints say when the request comes (a browser cannot know)."""

    missed: float = 0.0
    late: float = 0.0
    late_s: float = 5.0
    early: float = 0.0
    early_s: float = 30.0
    spurious: float = 0.0
    expected: bool = True


class Drawn(NamedTuple):
    """How the hints of one request go. offset_s: from the moment when typing begins, negative for earlier. spurious: for nothing."""

    missed: bool
    offset_s: float
    spurious: int


def draw(habits: Habits, chance: Callable[[], float]) -> Drawn:
    """By three numbers in [0, 1), in this order always, so that one habit never moves another's draws."""
    missed, kind, over = chance() < habits.missed, chance(), chance()
    offset_s = 0.0
    if kind < habits.late:
        offset_s = habits.late_s
    elif kind < habits.late + habits.early:
        offset_s = -habits.early_s
    return Drawn(missed, offset_s, int(habits.spurious) + (over < habits.spurious % 1))
