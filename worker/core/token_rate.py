"""Tokens a second of a model: those of prompts when they are admitted, and decoded ones (Prism, section 6.1)."""

from __future__ import annotations

import math

#: Time over which the rate is averaged, in seconds (Prism, figure 15b).
WINDOW_S = 60.0


class TokenRate:
    """A mean that forgets by 1 / e in `WINDOW_S`."""

    def __init__(self) -> None:
        self._tokens, self._at_s = 0.0, -math.inf

    def add(self, tokens: int, now: float) -> None:
        """Count tokens."""
        self._tokens, self._at_s = self._left(now) + tokens, now

    def at(self, now: float) -> float:
        """Tokens a second."""
        return self._left(now) / WINDOW_S

    def _left(self, now: float) -> float:
        return self._tokens * math.exp(min(self._at_s - now, 0.0) / WINDOW_S)
