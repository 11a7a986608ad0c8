"""How a session stands: advised, unadvised or dropped, and since when it is unused. The input of eviction and prefetch.

An advisory lifts its session until it expires, is invalidated, or its request comes; after that the session's chunks are
ordinary (or, when invalidated or expired, the first to go until the session is used again).
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Sequence
from dataclasses import dataclass
from enum import IntEnum

from contracts.ids import SessionKey
from contracts.kv import Manifest

#: Between two uses of a session whose order is known and whose times do not tell it, in seconds.
_LATER_S = 1e-3


class Rank(IntEnum):
    """Classes of victims, first to go first."""

    DROPPED = 0  #: invalidated, expired, or named by no session
    UNADVISED = 1
    ADVISED = 2


@dataclass(frozen=True, slots=True, order=True)
class Standing:
    """Compares as eviction does: the smaller goes first. `urgency` is minus the priority; `last_use` monotonic seconds."""

    rank: Rank
    urgency: int
    last_use: float


#: Of chunks that no session names.
NOBODY = Standing(Rank.DROPPED, -(1 << 20), float("-inf"))


@dataclass(slots=True)
class Advice:
    """One session's advisory: absolute monotonic times. device: that is to answer."""

    priority: int
    arrival: float
    expires: float
    device: int = 0
    invalidated: bool = False


class Sessions:
    """Advisories and last uses. Sessions not seen for a day, and not known otherwise, are forgotten (`trim`)."""

    def __init__(self) -> None:
        self.advice: dict[SessionKey, Advice] = {}
        self.changed: dict[SessionKey, None] = {}  #: whose standing may have changed; whoever ranks victims clears it
        self._last_use: dict[SessionKey, float] = {}
        self._expiries: list[tuple[float, SessionKey]] = []

    def advise(self, session: SessionKey, advice: Advice) -> None:
        """A hint came; it replaces an older one."""
        self.advice[session] = advice
        self.changed[session] = None
        heapq.heappush(self._expiries, (advice.expires, session))

    def expire(self, now: float) -> None:
        """Note in `changed` whose advisory has expired."""
        while self._expiries and self._expiries[0][0] <= now:
            self.changed[heapq.heappop(self._expiries)[1]] = None

    def invalidate(self, session: SessionKey) -> None:
        """The session is not coming after all."""
        advice = self.advice.get(session)
        if advice is None:
            self.advice[session] = Advice(0, float("inf"), float("-inf"), invalidated=True)
        else:
            advice.invalidated = True
        self.changed[session] = None

    def used(self, session: SessionKey, now: float) -> None:
        """A request of the session came or ended: its advisory has done its work."""
        self._last_use[session] = now
        self.advice.pop(session, None)
        self.changed[session] = None

    def seen(self, session: SessionKey, last_use: float) -> None:
        """A manifest or a save tells of a use, here or on another node."""
        if last_use > self._last_use.get(session, float("-inf")):
            self._last_use[session] = last_use
            self.changed[session] = None

    def forget(self, session: SessionKey) -> None:
        """The session was erased."""
        self.advice.pop(session, None)
        self._last_use.pop(session, None)
        self.changed[session] = None

    def live(self, session: SessionKey, now: float) -> Advice | None:
        """The session's advisory, when it still counts."""
        advice = self.advice.get(session)
        return advice if advice is not None and not advice.invalidated and now < advice.expires else None

    def standing(self, session: SessionKey, now: float) -> Standing:
        """Where the session stands among victims."""
        last_use = self._last_use.get(session, float("-inf"))
        advice = self.advice.get(session)
        if advice is None:
            return Standing(Rank.UNADVISED, 0, last_use)
        live = not advice.invalidated and now < advice.expires
        return Standing(Rank.ADVISED if live else Rank.DROPPED, -advice.priority, last_use)

    def trim(self, now: float, known: Container[SessionKey] = (), idle_s: float = 86_400.0) -> None:
        """Forget expired advice, and old uses of sessions that are not `known`; they stand as unadvised, last used long ago."""
        for advice in self.advice.values():
            advice.expires = now if advice.expires == float("-inf") else advice.expires
        for session in [s for s, a in self.advice.items() if now > a.expires + idle_s]:
            del self.advice[session]
            self.changed[session] = None
        for session in [s for s, t in self._last_use.items() if now > t + idle_s and s not in known]:
            del self._last_use[session]
            self.changed[session] = None


def strongest(standings: Sequence[Standing]) -> Standing:
    """The standing of a chunk: that of the session that protects it most."""
    return max(standings, default=NOBODY)


def use_s(manifest: Manifest, known: Manifest | None) -> float:
    """The time of a turn that has ended here: the wall clock's, but later than the one before it (a hybrid logical clock)."""
    return manifest.last_use_s if known is None else max(manifest.last_use_s, known.last_use_s + _LATER_S)
