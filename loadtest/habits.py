"""Imperfect hints: missed, late, early, or spurious (SYMPHONY, figures 19 and 20). Pure.

Used by real loads (`loadtest.variants`) and simulated users (`loadtest.simulate.users`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

#: A spurious hint comes at most this long after the request that it is drawn with.
SPURIOUS_WITHIN_S = 30.0


@dataclass(frozen=True, slots=True)
class Habits:
    """missed, late, early: shares of requests whose hint is not sent, is sent `late_s` after typing begins, or
    `early_s` before. spurious: hints without a request, per request; more than 1 is a flood. expected: whether hints
    give the expected arrival (a browser cannot know it)."""

    missed: float = 0.0
    late: float = 0.0
    late_s: float = 5.0
    early: float = 0.0
    early_s: float = 30.0
    spurious: float = 0.0
    expected: bool = True


class Drawn(NamedTuple):
    """The hints of one request. offset_s: from the start of typing, negative for earlier. spurious: number of hints
    without a request."""

    missed: bool
    offset_s: float
    spurious: int


def draw(habits: Habits, chance: Callable[[], float]) -> Drawn:
    """Draw from three calls of `chance` (uniform in [0, 1)), always three, so that habits do not affect each other's
    draws."""
    missed, kind, over = chance() < habits.missed, chance(), chance()
    offset_s = 0.0
    if kind < habits.late:
        offset_s = habits.late_s
    elif kind < habits.late + habits.early:
        offset_s = -habits.early_s
    return Drawn(missed, offset_s, int(habits.spurious) + (over < habits.spurious % 1))
