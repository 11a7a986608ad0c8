"""Limits rates with token buckets.

Hints, and queries (all requests but those for text), have a bucket per tenant each. A batch of hints counts as its
length. A batch larger than the bucket passes when the bucket is full and leaves a debt, so that a batch of any legal
size is possible at any rate.
"""

from __future__ import annotations

import math


class Bucket:
    """Refilled at `per_s` up to `burst`. Invariant: `level` <= `burst`; below zero it is a debt."""

    __slots__ = ("at_s", "burst", "level", "per_s")

    def __init__(self, per_s: float, burst: float, now_s: float) -> None:
        self.per_s, self.burst = per_s, burst
        self.level = burst
        #: When `level` was computed, in seconds on the caller's clock.
        self.at_s = now_s

    def refill(self, now_s: float) -> None:
        """Update `level` to `now_s`; a clock that went back changes nothing."""
        if now_s > self.at_s:
            self.level = min(self.burst, self.level + (now_s - self.at_s) * self.per_s)
            self.at_s = now_s

    def wait_s(self, wanted: float, now_s: float) -> float:
        """Seconds until `wanted` can be taken; 0: now. Takes nothing."""
        self.refill(now_s)
        missing = min(wanted, self.burst) - self.level
        return max(0.0, missing / self.per_s)

    def take(self, amount: float) -> None:
        """Take `amount`, into debt if needed; a negative amount gives back."""
        self.level = min(self.burst, self.level - amount)

    def full_in_s(self, now_s: float) -> float:
        """Seconds until the bucket is full, if nothing more is taken."""
        self.refill(now_s)
        return (self.burst - self.level) / self.per_s

    def validate(self) -> None:
        """Raises AssertionError when the invariant is broken."""
        assert self.level <= self.burst and math.isfinite(self.level)


class RateLimits:
    """One bucket per tenant."""

    def __init__(self, per_s: float, burst: float | None = None) -> None:
        self.per_s = per_s
        self.burst = burst if burst is not None else max(per_s, 1.0)
        self._buckets: dict[str, Bucket] = {}

    def take(self, tenant: str, count: int, now_s: float) -> float:
        """Take `count` from the tenant's bucket, or nothing at all.

        Returns 0 when granted, else the seconds after which a retry can succeed.
        """
        bucket = self._buckets.get(tenant)
        if bucket is None:
            bucket = self._buckets[tenant] = Bucket(self.per_s, self.burst, now_s)
        wait_s = bucket.wait_s(count, now_s)
        if not wait_s:
            bucket.take(count)
        return wait_s

    def validate(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        for bucket in self._buckets.values():
            bucket.validate()
