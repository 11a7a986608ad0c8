"""How many hints a tenant may send: a token bucket each, refilled at the configured rate.

A batch counts as its length. One that is larger than the bucket passes when the bucket is full and leaves a debt behind,
so that a batch of any legal size is possible at any rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class _Bucket:
    #: Never above the burst; below zero: a debt.
    level: float
    #: Seconds on the caller's clock when `level` was right.
    at_s: float


class HintLimits:
    """One bucket a tenant. Invariant: a level is at most `burst`."""

    def __init__(self, per_s: float, burst: float | None = None) -> None:
        self.per_s = per_s
        self.burst = burst if burst is not None else max(per_s, 1.0)
        self._buckets: dict[str, _Bucket] = {}

    def take(self, tenant: str, hints: int, now_s: float) -> float:
        """Take `hints` from the tenant's bucket, or nothing at all.

        Returns 0 when they were granted, else the seconds after which asking again can succeed.
        """
        bucket = self._buckets.setdefault(tenant, _Bucket(self.burst, now_s))
        bucket.level = min(self.burst, bucket.level + max(0.0, now_s - bucket.at_s) * self.per_s)
        bucket.at_s = now_s
        needed = min(float(hints), self.burst)
        if bucket.level >= needed:
            bucket.level -= hints
            return 0.0
        return (needed - bucket.level) / self.per_s

    def validate(self) -> None:
        """Raises AssertionError when the invariant is broken."""
        assert all(b.level <= self.burst and math.isfinite(b.level) for b in self._buckets.values())
