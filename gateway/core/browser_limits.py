"""How many hints one browser token may send: a token bucket each, beside its tenant's.

A page sends one in four seconds and one when it closes. The bucket leaves room for several tabs with one token, and lets a copy of a token
take nothing worth mentioning of what its tenant may send.
"""

from __future__ import annotations

import math
from collections import OrderedDict

#: Hints a second in the long run, and at once.
HINTS_PER_S, HINT_BURST = 2.0, 20.0
#: Tokens that are remembered at a time. One that is forgotten begins anew.
REMEMBERED = 50_000


class BrowserLimits:
    """The buckets of the tokens that were used last. Invariants: 0 <= level <= the burst; at most `remembered` of them."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        #: By token: how much is left, and seconds on the caller's clock when that was right. The least recently used one first.
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, token: str, hints: int, now_s: float) -> float:
        """Take `hints` of the token's, or nothing. Returns 0, or the seconds after which asking again can succeed; infinity: never, so
        many at once are too many."""
        level, at_s = self._buckets.pop(token, (HINT_BURST, now_s))
        level = min(HINT_BURST, level + max(0.0, now_s - at_s) * HINTS_PER_S)
        granted = hints <= level
        self._buckets[token] = (level - hints if granted else level, now_s)
        if len(self._buckets) > self._remembered:
            self._buckets.popitem(last=False)
        if granted:
            return 0.0
        return (hints - level) / HINTS_PER_S if hints <= HINT_BURST else math.inf

    def validate(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        assert len(self._buckets) <= self._remembered
        assert all(0 <= level <= HINT_BURST for level, _ in self._buckets.values())
