"""How a session stands among victims: withdrawn, unadvised or advised, how urgent, and when it was last used.

An advisory lifts its session until it expires; invalidated or expired, the session is withdrawn: the first to go, until it is
used or advised again. Once its request is here the standing holds until the turn has ended, so that what was fetched for it does
not leave while it waits for room.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum

from contracts.ids import SessionKey

#: Sessions that are remembered; beyond, the oldest half is forgotten and stands as unadvised, last used long ago.
MOST_SESSIONS = 20_000

#: (class, -priority, last use in seconds): compares as victims do, the smaller leaves first.
Standing = tuple[int, int, float]


class Rank(IntEnum):
    """Victim classes of DESIGN section 6, first victims first."""

    LOST_CAUSE = 0  # of a block, not of a session: not saved below, so nothing is preserved by waiting
    WITHDRAWN = 1  # its advisory was invalidated or has expired
    UNADVISED = 2
    ADVISED = 3


@dataclass(slots=True)
class Advice:
    """What a session's last advisory gave it. until_s: monotonic; infinite once the request is here."""

    priority: int
    until_s: float
    withdrawn: bool = False


@dataclass(slots=True)
class Standings:
    """Advisories and last uses, by session."""

    advice: dict[SessionKey, Advice] = field(default_factory=dict)
    _last_use: dict[SessionKey, float] = field(default_factory=dict)

    def advise(self, session: SessionKey, priority: int, until_s: float, now: float) -> None:
        """A hint came; it replaces an older one and counts as a use."""
        self.advice.pop(session, None)  # to the end: the oldest hints are forgotten first
        self.advice[session] = Advice(priority, until_s)
        self.used(session, now)
        _forget_half(self.advice)

    def withdraw(self, session: SessionKey) -> None:
        """The session is not coming after all."""
        self.advice.setdefault(session, Advice(0, 0.0)).withdrawn = True

    def came(self, session: SessionKey, now: float) -> None:
        """A request of the session is here."""
        self.used(session, now)
        advice = self.advice.get(session)
        if advice is not None:
            advice.until_s, advice.withdrawn = math.inf, False

    def ended(self, session: SessionKey, now: float) -> None:
        """A turn of the session ended: its advisory has done its work, unless a newer one came meanwhile."""
        self.used(session, now)
        advice = self.advice.get(session)
        if advice is not None and advice.until_s == math.inf:
            del self.advice[session]

    def used(self, session: SessionKey, now: float) -> None:
        """The session's cache is used now."""
        self._last_use.pop(session, None)
        self._last_use[session] = now
        _forget_half(self._last_use)

    def of(self, session: SessionKey, now: float) -> Standing:
        """Where the session stands."""
        last_use = self._last_use.get(session, 0.0)
        advice = self.advice.get(session)
        if advice is None:
            return Rank.UNADVISED, 0, last_use
        live = not advice.withdrawn and now < advice.until_s
        return (Rank.ADVISED if live else Rank.WITHDRAWN), -advice.priority, last_use

    def ends_s(self, now: float) -> float:
        """When the next live advisory expires; infinite: none does."""
        return min((a.until_s for a in self.advice.values() if a.until_s > now and not a.withdrawn), default=math.inf)

    def is_here(self, session: SessionKey) -> bool:
        """A request of an advised session is here."""
        advice = self.advice.get(session)
        return advice is not None and advice.until_s == math.inf

    def last_use(self, session: SessionKey) -> float:
        """When its cache was used last; long ago, where nothing is remembered."""
        return self._last_use.get(session, -math.inf)

    def strongest(self, sessions: Iterable[SessionKey], now: float) -> Standing:
        """The standing of what several sessions share: that of the one which protects it most."""
        return max((self.of(session, now) for session in sessions), default=(Rank.WITHDRAWN, 0, 0.0))


def _forget_half(by_age: dict[SessionKey, Advice] | dict[SessionKey, float]) -> None:
    if len(by_age) > MOST_SESSIONS:
        for session in list(by_age)[: MOST_SESSIONS // 2]:
            del by_age[session]
