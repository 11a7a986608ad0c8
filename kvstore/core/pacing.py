"""When the next prefetch read may start, at a fixed rate of bytes a second. Demand is never paced.

A read may start when the reads before it have had their time at the rate. Unused time is not saved up, except
`_CATCH_UP_S`, which covers late wake-ups.
"""

from __future__ import annotations

_CATCH_UP_S = 0.02


class ReadPacer:
    """bytes_per_s: 0 means no limit."""

    def __init__(self, bytes_per_s: float = 0.0) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at = float("-inf")

    def wait_s(self, now: float) -> float:
        """Seconds until the next read may start; 0: now."""
        return max(0.0, self._free_at - now)

    def started(self, size_bytes: int, now: float) -> None:
        """A read of `size_bytes` starts now."""
        if self.bytes_per_s:
            self._free_at = max(self._free_at, now - _CATCH_UP_S) + size_bytes / self.bytes_per_s
