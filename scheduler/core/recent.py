"""Sums of the last minutes, by key. Kept in buckets of time, so a sum costs the same however much was added."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Recent(Generic[Key]):
    """What was added in the last `window_s` seconds, give or take `bucket_s`. Times must not decrease."""

    def __init__(self, window_s: float, bucket_s: float) -> None:
        self.window_s, self._bucket_s = window_s, bucket_s
        self._buckets: deque[tuple[int, Counter[Key]]] = deque()
        #: When something was first added or asked; None: not yet.
        self.began_s: float | None = None

    def add(self, key: Key, amount: float, now: float) -> None:
        """Add to the sum of `key`."""
        self._forget(now)
        number = int(now // self._bucket_s)
        if not self._buckets or self._buckets[-1][0] < number:
            self._buckets.append((number, Counter()))
        self._buckets[-1][1][key] += amount  # type: ignore[assignment]  # a Counter of fractions

    def sums(self, now: float) -> dict[Key, float]:
        """The sum of each key that has one."""
        self._forget(now)
        found: dict[Key, float] = {}
        for _, bucket in self._buckets:
            for key, amount in bucket.items():
                found[key] = found.get(key, 0.0) + amount
        return found

    def rates(self, now: float) -> dict[Key, float]:
        """The sums a second: over the window, or over the time since the first call if that is shorter."""
        sums = self.sums(now)
        began_s = now if self.began_s is None else self.began_s
        span_s = min(max(now - began_s, self._bucket_s), self.window_s)
        return {key: amount / span_s for key, amount in sums.items()}

    def _forget(self, now: float) -> None:
        if self.began_s is None:
            self.began_s = now
        oldest = int((now - self.window_s) // self._bucket_s)
        while self._buckets and self._buckets[0][0] <= oldest:
            self._buckets.popleft()
