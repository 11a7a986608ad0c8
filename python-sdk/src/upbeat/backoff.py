"""When to try again. Pure: time and chance are arguments."""

from __future__ import annotations

FIRST_S = 0.25
MOST_S = 30.0
#: A server that asks for more patience than this is asked again then all the same.
LONGEST_RETRY_AFTER_S = 300.0


class Backoff:
    """Pauses that double from FIRST_S to MOST_S, each shortened by up to a half by chance, so that clients do not return together."""

    def __init__(self) -> None:
        self._failures = 0
        self._until_s = 0.0

    def failed(self, now_s: float, chance: float, retry_after_s: float | None = None) -> None:
        """It did not work. chance: 0 to 1. retry_after_s: what the server said, which counts when it is longer."""
        pause_s = min(MOST_S, FIRST_S * 2.0 ** min(self._failures, 16)) * (1.0 - chance / 2.0)
        self._failures += 1
        self._until_s = now_s + max(pause_s, min(retry_after_s or 0.0, LONGEST_RETRY_AFTER_S))

    def worked(self) -> None:
        """All is well again."""
        self._failures, self._until_s = 0, 0.0

    def wait_s(self, now_s: float) -> float:
        """Seconds until the next try."""
        return max(0.0, self._until_s - now_s)
