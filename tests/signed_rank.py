"""Wilcoxon's signed-rank statistic: whether paired measurements differ, however their noise is distributed."""

from __future__ import annotations

import math


def standing_out(differences: list[float]) -> float:
    """How many standard deviations the signed-rank sum of these is away from what it is when there is no difference."""
    ranked = sorted((d for d in differences if d), key=abs)
    n = len(ranked)
    above = sum(rank for rank, d in enumerate(ranked, 1) if d > 0)
    return (above - n * (n + 1) / 4) / math.sqrt(n * (n + 1) * (2 * n + 1) / 24)
