"""A session's standing for eviction and prefetch: advised, unadvised or dropped, and its last use.

An advisory protects its session until it expires, is invalidated, or its request comes. After its request the session
is unadvised; after expiry or invalidation it is dropped, the first to be evicted, until it is used again.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container
from dataclasses import dataclass
from itertools import islice

from contracts.ids import SessionKey
from contracts.kv import Manifest
from contracts.memory.victim_order import Standing, standing

#: Seconds added to the last use when a later use has an earlier wall-clock time.
_LATER_S = 1e-3
#: Old uses that one `trim` looks at, so that it stays short with any number of sessions.
_LOOKS = 16
#: Most advisories that one look at the clock ends; the next one goes on.
MOST_ENDED = 1000
#: Outdated entries that a heap of expiries may have beside twice the live ones.
_SLACK = 4096


class Expiries:
    """When advisories end, earliest first. Times are monotonic. Outdated entries are dropped when they are many, as
    anybody can renew hints. current: when a session's advisory ends, None without one; live: number of advisories."""

    def __init__(self, current: Callable[[SessionKey], float | None], live: Callable[[], int]) -> None:
        self._current, self._live = current, live
        self._heap: list[tuple[float, SessionKey]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, at: float, session: SessionKey) -> None:
        """The session's advisory ends at `at`."""
        heapq.heappush(self._heap, (at, session))
        if len(self._heap) > 2 * self._live() + _SLACK:
            self._heap = list({entry for entry in self._heap if self._current(entry[1]) == entry[0]})
            heapq.heapify(self._heap)

    def due(self, now: float) -> list[SessionKey]:
        """Remove and return the sessions of the first entries that are due, at most `MOST_ENDED`."""
        due: list[SessionKey] = []
        while self._heap and self._heap[0][0] <= now and len(due) < MOST_ENDED:
            due.append(heapq.heappop(self._heap)[1])
        return due


@dataclass(slots=True)
class Advice:
    """One session's advisory. Times are monotonic. device: where its turn will run."""

    priority: int
    arrival: float
    expires: float
    device: int = 0
    invalidated: bool = False

    def counts(self, now: float) -> bool:
        """Whether it protects its session."""
        return not self.invalidated and now < self.expires


class Sessions:
    """Advisories and last uses. `trim` forgets sessions of which nothing is known here: without a use as soon as their
    advisory ends, with one a day after it. Its cost does not grow with the number of sessions: anybody can send hints.
    """

    def __init__(self) -> None:
        self.advice: dict[SessionKey, Advice] = {}
        self.changed: dict[SessionKey, None] = {}  #: sessions whose standing may have changed; eviction.py clears it
        self._last_use: dict[SessionKey, float] = {}  #: in the order in which they became known
        self._expiries = Expiries(self._expires, self.advice.__len__)
        self._ended: dict[SessionKey, None] = {}  #: sessions whose advisory may have ended since the last `trim`

    def advise(self, session: SessionKey, advice: Advice) -> None:
        """A hint came; it replaces the older one."""
        self.advice[session] = advice
        self.changed[session] = None
        self._expiries.add(advice.expires, session)

    def expire(self, now: float) -> None:
        """Add sessions whose advisory has expired to `changed`, at most `MOST_ENDED`."""
        for session in self._expiries.due(now):
            self.changed[session] = self._ended[session] = None

    def invalidate(self, session: SessionKey) -> None:
        """The advisory was withdrawn."""
        advice = self.advice.get(session)
        if advice is None:
            self.advice[session] = Advice(0, float("inf"), float("-inf"), invalidated=True)
        else:
            advice.invalidated = True
        self.changed[session] = self._ended[session] = None

    def used(self, session: SessionKey, now: float) -> None:
        """A request of the session came or ended; its advisory ends."""
        self._note(session, now)
        self.advice.pop(session, None)
        self.changed[session] = None

    def seen(self, session: SessionKey, last_use: float) -> None:
        """A manifest or a save shows a use, here or on another node."""
        if last_use > self._last_use.get(session, float("-inf")):
            self._note(session, last_use)
            self.changed[session] = None

    def unadvise(self, session: SessionKey) -> None:
        """Forget the advisory, which was for nothing known here."""
        self.advice.pop(session, None)
        self.changed[session] = None

    def is_used(self, session: SessionKey) -> bool:
        """Whether a use of the session is remembered."""
        return session in self._last_use

    def forget(self, session: SessionKey) -> None:
        """The session was erased."""
        self.advice.pop(session, None)
        self._last_use.pop(session, None)
        self.changed[session] = None

    def live(self, session: SessionKey, now: float) -> Advice | None:
        """The session's advisory, if it still counts."""
        advice = self.advice.get(session)
        return advice if advice is not None and advice.counts(now) else None

    def standing(self, session: SessionKey, now: float) -> Standing:
        """The session's standing in the victim order."""
        last_use = self._last_use.get(session, float("-inf"))
        advice = self.advice.get(session)
        live = advice is not None and advice.counts(now)
        return standing(None if advice is None else advice.priority, live, last_use)

    def trim(self, now: float, known: Container[SessionKey] = (), idle_s: float = 86_400.0) -> None:
        """Forget what is left of advisories and uses of sessions not in `known`: without a use once the advisory has
        ended, else more than `idle_s` after the use. Looks at what ended since the last call and at few old uses."""
        self.expire(now)
        for session in self._ended:
            advice = self.advice.get(session)
            if advice is None or advice.counts(now) or session in self._last_use:
                continue
            if session in known:
                self._note(session, float("-inf"))  # it goes with the others once nobody knows it
            else:
                del self.advice[session]
                self.changed[session] = None
        self._ended.clear()
        for session, last_use in list(islice(self._last_use.items(), _LOOKS)):
            if now <= last_use + idle_s:
                break
            advice = self.advice.get(session)
            if session in known or (advice is not None and advice.counts(now)):
                self._note(session, last_use)
            else:
                self.forget(session)

    def _expires(self, session: SessionKey) -> float | None:
        advice = self.advice.get(session)
        return None if advice is None else advice.expires

    def _note(self, session: SessionKey, last_use: float) -> None:
        self._last_use.pop(session, None)
        self._last_use[session] = last_use


def use_s(manifest: Manifest, known: Manifest | None) -> float:
    """The last use of a turn that ended here: wall-clock time, but later than the known one (a hybrid logical
    clock)."""
    return manifest.last_use_s if known is None else max(manifest.last_use_s, known.last_use_s + _LATER_S)
