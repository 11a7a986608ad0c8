"""How much KV sessions have that may come back: those used within `RESUMABLE_S`.

Kept by time of last use, so that the sum costs the same for any number of sessions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

#: A session that was used within this time may come back, in seconds.
RESUMABLE_S = 600.0
_BUCKET_S = 30.0


class Resumable:
    """Bytes of sessions' whole caches by last use. Invariant: no sum is 0 or less."""

    def __init__(self) -> None:
        self._bytes: dict[int, int] = {}

    def add(self, last_use_s: float, size: int) -> None:
        """A session of `size` bytes was last used then; a negative size takes it back. Seconds since the epoch."""
        if not math.isfinite(last_use_s) or not size:
            return
        bucket = int(last_use_s // _BUCKET_S)
        total = self._bytes.get(bucket, 0) + size
        if total > 0:
            self._bytes[bucket] = total
        else:
            self._bytes.pop(bucket, None)

    def bytes(self, wall: float) -> int:
        """Bytes of sessions used within `RESUMABLE_S` of `wall`, before or after: nodes' clocks differ."""
        first, last = (int((wall + side * RESUMABLE_S) // _BUCKET_S) for side in (-1, 1))
        return sum(self._bytes.get(bucket, 0) for bucket in range(first + 1, last + 1))

    def validate(self, sessions: Iterable[tuple[float, int]]) -> None:
        """Raise AssertionError when the sums are not those of these sessions: last use, bytes."""
        expected = Resumable()
        for last_use_s, size in sessions:
            expected.add(last_use_s, size)
        assert self._bytes == expected._bytes
