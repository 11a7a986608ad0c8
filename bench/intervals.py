"""Figures with intervals of 95 %, for the claims of docs/evidence.md. Pure; equal samples give equal intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

CONFIDENCE = 0.95
#: With fewer samples there is only a range, which decides nothing.
LEAST = 5
_DRAWS, _SEED = 4000, 1


@dataclass(frozen=True, slots=True)
class Estimate:
    """value: the figure. low, high: its interval, or the samples' range if `decides` is false. samples: what was
    resampled, in words."""

    value: float
    low: float
    high: float
    samples: str
    decides: bool


def _estimate(value: float, drawn: Any, samples: str) -> Estimate:
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(float(value), float(low), float(high), samples, decides=True)


def of_ratios(ratios: Sequence[float], what: str) -> Estimate:
    """The geometric mean of ratios of pairs. Raises ValueError without any."""
    values = np.asarray([float(ratio) for ratio in ratios])
    if not len(values):
        raise ValueError(f"no {what}")
    middle, samples = float(np.exp(np.log(values).mean())), f"{len(values)} {what}"
    if len(values) < LEAST:
        return Estimate(middle, float(values.min()), float(values.max()), samples, decides=False)
    drawn = np.random.default_rng(_SEED).choice(np.log(values), (_DRAWS, len(values))).mean(axis=1)
    return _estimate(middle, np.exp(drawn), samples)


def of_medians(ours: Sequence[float], theirs: Sequence[float], what: str) -> Estimate:
    """The ratio of the medians of samples that are no pairs. Raises ValueError without any."""
    a, b = (np.asarray([float(x) for x in of]) for of in (ours, theirs))
    if not len(a) or not len(b):
        raise ValueError(f"no {what}")
    middle, samples = float(np.median(a) / np.median(b)), f"{len(a)} and {len(b)} {what}"
    if min(len(a), len(b)) < LEAST:
        return Estimate(middle, float(a.min() / b.max()), float(a.max() / b.min()), samples, decides=False)
    chance = np.random.default_rng(_SEED)
    top, bottom = (np.median(chance.choice(of, (_DRAWS, len(of))), axis=1) for of in (a, b))
    return _estimate(middle, top / bottom, samples)


def of_share(hits: float, count: float, what: str) -> Estimate:
    """A share of independent trials, with Wilson's interval. Raises ValueError without any."""
    if count < 1:
        raise ValueError(f"no {what}")
    z, n, share = 1.959964, float(count), float(hits) / float(count)
    middle, half = share + z * z / (2 * n), z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    low, high = ((middle + sign * half) / (1 + z * z / n) for sign in (-1, 1))
    return Estimate(share, min(share, max(0.0, low)), max(share, min(1.0, high)), f"{n:.0f} {what}", decides=True)


def holds(of: Estimate, bound: float, *, below: bool) -> bool | None:
    """Whether the figure is below (or above) `bound`, by its whole interval; None: not decided."""
    if not of.decides:
        return None
    wrong: Callable[[float], bool] = (lambda x: x >= bound) if below else (lambda x: x <= bound)
    if wrong(of.low) == wrong(of.high):
        return not wrong(of.low)
    return None
