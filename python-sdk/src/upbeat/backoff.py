"""When to retry. Pure: time and randomness are arguments."""

from __future__ import annotations

FIRST_S = 0.25
MOST_S = 30.0
#: Upper bound of a server's Retry-After.
LONGEST_RETRY_AFTER_S = 300.0


class Backoff:
    """Pauses that double from FIRST_S to MOST_S, each shortened randomly by up to half, so that clients do not retry
    in step."""

    def __init__(self) -> None:
        self._failures = 0
        self._until_s = 0.0

    def failed(self, now_s: float, chance: float, retry_after_s: float | None = None) -> None:
        """Record a failure. chance: random, 0 to 1. retry_after_s: the server's Retry-After, used if longer."""
        pause_s = min(MOST_S, FIRST_S * 2.0 ** min(self._failures, 16)) * (1.0 - chance / 2.0)
        self._failures += 1
        self._until_s = now_s + max(pause_s, min(retry_after_s or 0.0, LONGEST_RETRY_AFTER_S))

    def worked(self) -> None:
        """Record a success: the next failure starts at FIRST_S again."""
        self._failures, self._until_s = 0, 0.0

    def wait_s(self, now_s: float) -> float:
        """Seconds until the next attempt may start."""
        return max(0.0, self._until_s - now_s)
