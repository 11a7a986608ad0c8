"""Compares two ways of doing the same, measured in turns, and keeps the figures.

Each repetition does both, in alternating order; the median of the repetitions' ratios counts. So noise that lasts
longer than a repetition cancels out.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Pair:
    """A comparison of rates. `ratio`: median of ours over the other. `at_least`: the wanted ratio."""

    question: str
    ours: float
    other: float
    unit: str
    ratio: float
    ratio_range: tuple[float, float]
    repetitions: int
    at_least: float | None = None
    note: str = ""

    @property
    def holds(self) -> bool | None:
        return None if self.at_least is None else self.ratio >= self.at_least

    def document(self) -> dict[str, Any]:
        return asdict(self) | {"holds": self.holds}


@dataclass
class Figure:
    """One figure and its limit, if any."""

    question: str
    value: float
    unit: str
    at_most: float | None = None
    at_least: float | None = None
    note: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def holds(self) -> bool | None:
        if self.at_most is not None:
            return self.value <= self.at_most
        return None if self.at_least is None else self.value >= self.at_least

    def document(self) -> dict[str, Any]:
        return asdict(self) | {"holds": self.holds}


def compare(
    question: str,
    ours: Callable[[], float],
    other: Callable[[], float],
    amount: float,
    unit: str,
    repetitions: int,
    at_least: float | None = None,
    note: str = "",
) -> Pair:
    """Time `ours` and `other`, which return the seconds for `amount`; a first repetition is not counted."""
    ours()
    other()
    times: list[tuple[float, float]] = []
    for repetition in range(repetitions):
        if repetition % 2:
            theirs = other()
            times.append((ours(), theirs))
        else:
            times.append((ours(), other()))
    ratios = sorted(b / a for a, b in times)
    return Pair(
        question,
        round(amount / statistics.median(a for a, _ in times), 3),
        round(amount / statistics.median(b for _, b in times), 3),
        unit,
        round(statistics.median(ratios), 3),
        (round(ratios[0], 3), round(ratios[-1], 3)),
        repetitions,
        at_least,
        note,
    )
