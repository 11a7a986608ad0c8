"""Moving means of step durations, from which a hint's expected arrival is taken. Pure."""

from __future__ import annotations

#: Weight of the newest observation.
WEIGHT = 0.3
MAX_KEYS = 4096


class Pace:
    """A moving mean of seconds for each key. Above MAX_KEYS keys, the one seen first is dropped."""

    def __init__(self) -> None:
        self._mean_s: dict[tuple[str, ...], float] = {}

    def note(self, key: tuple[str, ...], seconds: float) -> None:
        """Add an observation; negative `seconds` count as 0."""
        seconds = max(0.0, seconds)
        before = self._mean_s.get(key)
        self._mean_s[key] = seconds if before is None else before + WEIGHT * (seconds - before)
        if len(self._mean_s) > MAX_KEYS:
            del self._mean_s[next(iter(self._mean_s))]

    def expected_s(self, key: tuple[str, ...]) -> float | None:
        """The mean in seconds, or None if `key` was never observed."""
        return self._mean_s.get(key)
