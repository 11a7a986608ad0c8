"""Random arrivals and lengths of generated traces, and their fit to a trace. Pure.

BurstGPT (Wang et al., KDD 2025) describes gaps between requests by gamma distributions whose shape is the burstiness,
request lengths by a Zipf law, and answer lengths by a bimodal distribution. Only the forms are from there: numbers are
arguments, and `fit` takes them from any trace.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: Ranks of the Zipf law of lengths; the first is the shortest.
_RANKS = 1000
#: Shares and log-normal spreads of short and long answers, and how much longer the long ones are in the median.
_SHORT_SHARE, _SHORT_SIGMA, _LONG_SIGMA, _LONGER = 0.4, 0.7, 0.5, 8.0


@dataclass(frozen=True, slots=True)
class Burstiness:
    """Gamma-distributed gaps between arrivals. shape: 1 is Poisson, less is burstier; per_s: mean arrivals a second."""

    shape: float
    per_s: float

    def gap(self, rng: random.Random) -> float:
        """Seconds until the next arrival."""
        return rng.gammavariate(self.shape, 1 / (self.shape * self.per_s))


def fit(arrivals_s: Sequence[float]) -> Burstiness:
    """Fits arrivals by the moments of their gaps: the shape is 1 over the squared coefficient of variation.

    Raises ValueError for fewer than three arrivals, or when all have one time.
    """
    gaps = np.diff(np.sort(np.asarray(arrivals_s, dtype=float)))
    if len(gaps) < 2 or gaps.sum() <= 0:
        raise ValueError("a burstiness takes three arrivals at two times at least")
    mean, variance = float(gaps.mean()), float(gaps.var())
    return Burstiness(shape=mean**2 / variance if variance else 100.0, per_s=1 / mean)


class ZipfLengths:
    """Prompt lengths: the r-th of `_RANKS` evenly spaced lengths has a probability proportional to r^-exponent; the
    mean is `mean` tokens."""

    def __init__(self, mean: float, exponent: float = 1.1) -> None:
        weights = [rank**-exponent for rank in range(1, _RANKS + 1)]
        total = sum(weights)
        self._step: float = mean * total / sum(rank * weight for rank, weight in enumerate(weights, 1))
        self._weights = weights

    def draw(self, rng: random.Random) -> int:
        """One length in tokens, at least 8."""
        (rank,) = rng.choices(range(1, _RANKS + 1), self._weights)
        return max(8, int(self._step * (rank - rng.random()) + 0.5))


def answer_tokens(rng: random.Random, mean: float) -> int:
    """The length of an answer, at least 2, drawn from two log-normal modes with overall mean `mean`."""
    short = 1 / (
        _SHORT_SHARE * math.exp(_SHORT_SIGMA**2 / 2) + (1 - _SHORT_SHARE) * _LONGER * math.exp(_LONG_SIGMA**2 / 2)
    )
    if rng.random() < _SHORT_SHARE:
        return max(2, round(mean * short * rng.lognormvariate(0.0, _SHORT_SIGMA)))
    return max(2, round(mean * short * _LONGER * rng.lognormvariate(0.0, _LONG_SIGMA)))
