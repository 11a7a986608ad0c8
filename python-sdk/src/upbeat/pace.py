"""How long things took lately, so that a hint can say when. Pure."""

from __future__ import annotations

#: The newest observation's weight.
WEIGHT = 0.3
MAX_KEYS = 4096


class Pace:
    """A moving mean of seconds for each key. Of more than MAX_KEYS keys the one first seen is forgotten."""

    def __init__(self) -> None:
        self._mean_s: dict[tuple[str, ...], float] = {}

    def note(self, key: tuple[str, ...], seconds: float) -> None:
        """It took so long this time."""
        seconds = max(0.0, seconds)
        before = self._mean_s.get(key)
        self._mean_s[key] = seconds if before is None else before + WEIGHT * (seconds - before)
        if len(self._mean_s) > MAX_KEYS:
            del self._mean_s[next(iter(self._mean_s))]

    def expected_s(self, key: tuple[str, ...]) -> float | None:
        """What it takes, or None when nobody has seen it."""
        return self._mean_s.get(key)
