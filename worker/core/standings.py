"""A session's standing in the eviction order: withdrawn, unadvised or advised, priority, and last use.

An advisory protects its session until it expires. An invalidated or expired one makes the session's cache the first to
be evicted, until it is used or advised again. When the request arrives, the protection holds until the turn ends, so
that loaded pieces stay while the request waits for room.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from contracts.ids import SessionKey
from contracts.memory.victim_order import Standing, standing, strongest

#: Maximum number of remembered sessions; beyond, the oldest half becomes unadvised and last used long ago.
MOST_SESSIONS = 20_000
#: Maximum number of tenants whose weights are remembered.
MOST_WEIGHTS = 10_000


@dataclass(slots=True)
class Advice:
    """A session's last advisory. until_s: monotonic; infinite once the request is here."""

    priority: int
    until_s: float
    withdrawn: bool = False


@dataclass(slots=True)
class Standings:
    """Advisories and last uses, by session; and weights of tenants."""

    advice: dict[SessionKey, Advice] = field(default_factory=dict)
    #: The last use of any session.
    latest_s: float = -math.inf
    _last_use: dict[SessionKey, float] = field(default_factory=dict)
    _passed: dict[SessionKey, int] = field(default_factory=dict)
    _weights: dict[str, float] = field(default_factory=dict)

    def weigh(self, tenant: str, weight: float) -> None:
        """Record the weight of a tenant's part of the cache."""
        if len(self._weights) >= MOST_WEIGHTS:
            self._weights.clear()
        self._weights[tenant] = weight

    def weight(self, tenant: str) -> float:
        """The tenant's weight; 1 if it has sent no request."""
        return self._weights.get(tenant, 1.0)

    def advise(self, session: SessionKey, priority: int, until_s: float, now: float) -> None:
        """Record a hint. It replaces an older one and counts as a use."""
        self.advice.pop(session, None)  # to the end: the oldest hints are forgotten first
        self.advice[session] = Advice(priority, until_s)
        self.used(session, now)
        _forget_half(self.advice)

    def withdraw(self, session: SessionKey) -> None:
        """The session's hint was invalidated."""
        self.advice.setdefault(session, Advice(0, 0.0)).withdrawn = True

    def came(self, session: SessionKey, now: float) -> None:
        """A request of the session arrived."""
        self.used(session, now)
        advice = self.advice.get(session)
        if advice is not None:
            advice.until_s, advice.withdrawn = math.inf, False

    def ended(self, session: SessionKey, now: float) -> None:
        """A turn of the session ended, and with it its advisory, unless a newer one has come."""
        self.used(session, now)
        advice = self.advice.get(session)
        if advice is not None and advice.until_s == math.inf:
            del self.advice[session]

    def used(self, session: SessionKey, now: float) -> None:
        """The session's cache is used now."""
        self._last_use.pop(session, None)
        self._last_use[session] = now
        self.latest_s = max(self.latest_s, now)
        _forget_half(self._last_use)

    def passes(self, session: SessionKey, blocks: int) -> None:
        """The session's next turn will have passed so many of its leading blocks (`worker.core.windowed`)."""
        self._passed.pop(session, None)
        self._passed[session] = blocks
        _forget_half(self._passed)

    def passed(self, session: SessionKey) -> int:
        """Number of leading blocks that the session's next turn will have passed; 0 if unknown."""
        return self._passed.get(session, 0)

    def of(self, session: SessionKey, now: float) -> Standing:
        """The session's standing."""
        last_use = self._last_use.get(session, 0.0)
        advice = self.advice.get(session)
        live = advice is not None and not advice.withdrawn and now < advice.until_s
        return standing(None if advice is None else advice.priority, live, last_use)

    def ends_s(self, now: float) -> float:
        """When the next live advisory expires; infinite if none does."""
        return min((a.until_s for a in self.advice.values() if a.until_s > now and not a.withdrawn), default=math.inf)

    def is_here(self, session: SessionKey) -> bool:
        """Whether a request of this advised session is here."""
        advice = self.advice.get(session)
        return advice is not None and advice.until_s == math.inf

    def last_use(self, session: SessionKey) -> float:
        """When the session's cache was last used; minus infinity if unknown."""
        return self._last_use.get(session, -math.inf)

    def strongest(self, sessions: Iterable[SessionKey], now: float) -> Standing:
        """The standing of a block that several sessions share."""
        return strongest(self.of(session, now) for session in sessions)


def _forget_half(by_age: dict[SessionKey, Advice] | dict[SessionKey, float] | dict[SessionKey, int]) -> None:
    if len(by_age) > MOST_SESSIONS:
        for session in list(by_age)[: MOST_SESSIONS // 2]:
            del by_age[session]
