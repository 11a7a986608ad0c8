"""How many hints a browser token may send: one token bucket per token, beside its tenant's.

A page sends one hint every four seconds and one when it closes. The bucket allows several tabs with one token, and
keeps a copied token from using up its tenant's hints.
"""

from __future__ import annotations

import math
from collections import OrderedDict

#: Refill rate, and hints at once.
HINTS_PER_S, HINT_BURST = 2.0, 20.0
#: Number of buckets kept. A forgotten token starts with a full bucket.
REMEMBERED = 50_000


class BrowserLimits:
    """The buckets of the most recently used tokens. Invariants: 0 <= level <= burst; at most `remembered` buckets."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        #: By token: the level, and when it was computed, in seconds on the caller's clock. Least recently used first.
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, token: str, hints: int, now_s: float) -> float:
        """Take `hints` from the token's bucket, or nothing. Returns 0, or the seconds after which a retry can succeed;
        infinity: more hints than the burst."""
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
