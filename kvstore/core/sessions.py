"""A session's standing for eviction and prefetch: advised, unadvised or dropped, and its last use.

An advisory protects its session until it expires, is invalidated, or its request comes. After its request the session
is unadvised; after expiry or invalidation it is dropped, the first to be evicted, until it is used again.
"""

from __future__ import annotations

import heapq
from collections.abc import Container
from dataclasses import dataclass

from contracts.ids import SessionKey
from contracts.kv import Manifest
from contracts.memory.victim_order import Standing, standing

#: Seconds added to the last use when a later use has an earlier wall-clock time.
_LATER_S = 1e-3


@dataclass(slots=True)
class Advice:
    """One session's advisory. Times are monotonic. device: where its turn will run."""

    priority: int
    arrival: float
    expires: float
    device: int = 0
    invalidated: bool = False


class Sessions:
    """Advisories and last uses. `trim` forgets unknown sessions not seen for a day."""

    def __init__(self) -> None:
        self.advice: dict[SessionKey, Advice] = {}
        self.changed: dict[SessionKey, None] = {}  #: sessions whose standing may have changed; eviction.py clears it
        self._last_use: dict[SessionKey, float] = {}
        self._expiries: list[tuple[float, SessionKey]] = []

    def advise(self, session: SessionKey, advice: Advice) -> None:
        """A hint came; it replaces the older one."""
        self.advice[session] = advice
        self.changed[session] = None
        heapq.heappush(self._expiries, (advice.expires, session))

    def expire(self, now: float) -> None:
        """Add sessions whose advisory has expired to `changed`."""
        while self._expiries and self._expiries[0][0] <= now:
            self.changed[heapq.heappop(self._expiries)[1]] = None

    def invalidate(self, session: SessionKey) -> None:
        """The advisory was withdrawn."""
        advice = self.advice.get(session)
        if advice is None:
            self.advice[session] = Advice(0, float("inf"), float("-inf"), invalidated=True)
        else:
            advice.invalidated = True
        self.changed[session] = None

    def used(self, session: SessionKey, now: float) -> None:
        """A request of the session came or ended; its advisory ends."""
        self._last_use[session] = now
        self.advice.pop(session, None)
        self.changed[session] = None

    def seen(self, session: SessionKey, last_use: float) -> None:
        """A manifest or a save shows a use, here or on another node."""
        if last_use > self._last_use.get(session, float("-inf")):
            self._last_use[session] = last_use
            self.changed[session] = None

    def forget(self, session: SessionKey) -> None:
        """The session was erased."""
        self.advice.pop(session, None)
        self._last_use.pop(session, None)
        self.changed[session] = None

    def live(self, session: SessionKey, now: float) -> Advice | None:
        """The session's advisory, if it still counts."""
        advice = self.advice.get(session)
        return advice if advice is not None and not advice.invalidated and now < advice.expires else None

    def standing(self, session: SessionKey, now: float) -> Standing:
        """The session's standing in the victim order."""
        last_use = self._last_use.get(session, float("-inf"))
        advice = self.advice.get(session)
        live = advice is not None and not advice.invalidated and now < advice.expires
        return standing(None if advice is None else advice.priority, live, last_use)

    def trim(self, now: float, known: Container[SessionKey] = (), idle_s: float = 86_400.0) -> None:
        """Forget advice that expired, and uses of sessions not in `known`, more than `idle_s` ago."""
        for advice in self.advice.values():
            advice.expires = now if advice.expires == float("-inf") else advice.expires
        for session in [s for s, a in self.advice.items() if now > a.expires + idle_s]:
            del self.advice[session]
            self.changed[session] = None
        for session in [s for s, t in self._last_use.items() if now > t + idle_s and s not in known]:
            del self._last_use[session]
            self.changed[session] = None


def use_s(manifest: Manifest, known: Manifest | None) -> float:
    """The last use of a turn that ended here: wall-clock time, but later than the known one (a hybrid logical
    clock)."""
    return manifest.last_use_s if known is None else max(manifest.last_use_s, known.last_use_s + _LATER_S)
