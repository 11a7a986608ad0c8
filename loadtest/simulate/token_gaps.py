"""Times between tokens of answers, of all requests of a model."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass(slots=True)
class TokenGaps:
    """Seconds between two tokens of one request, with counts; of steps that are simulated as one event, their mean."""

    seconds: array[float] = field(default_factory=lambda: array("d"))
    counts: array[int] = field(default_factory=lambda: array("l"))

    def add(self, seconds: float, count: int) -> None:
        """So many gaps of this length."""
        self.seconds.append(seconds)
        self.counts.append(count)


def percentiles(of: Iterable[TokenGaps], shares: Iterable[float]) -> list[float]:
    """The least gaps that are at least as long as these shares, in percent, of all; 0 where there is none."""
    made = list(of)
    seconds: npt.NDArray[np.float64] = np.concatenate([np.array(each.seconds) for each in made])
    counts: npt.NDArray[np.int64] = np.concatenate([np.array(each.counts) for each in made])
    if not len(seconds):
        return [0.0 for _ in shares]
    order = np.argsort(seconds)
    sums = np.cumsum(counts[order])
    return [
        float(seconds[order][min(np.searchsorted(sums, share / 100 * sums[-1]), len(order) - 1)]) for share in shares
    ]
