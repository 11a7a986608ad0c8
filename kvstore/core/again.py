"""When a hint's load that ended short, for want of room, is begun again.

Room comes as requests end, saves are written and other hints come true. So a session that was cut is tried again for as long as its hint
counts: not before `PAUSE_S` has passed, and twice as long after each vain try.
"""

from __future__ import annotations

from collections.abc import Set

from contracts.ids import SessionKey

PAUSE_S, MOST_S = 0.25, 4.0


class Again:
    """See the module. Times are monotonic seconds. A session is forgotten when its hint does not count any more."""

    def __init__(self) -> None:
        self._pauses_s: dict[SessionKey, float] = {}  #: of each that was ever cut: before the next try
        self._due_s: dict[SessionKey, float] = {}

    @property
    def sessions(self) -> Set[SessionKey]:
        """Those that were ever cut."""
        return self._pauses_s.keys()

    @property
    def waiting(self) -> bool:
        """Some are to be tried again."""
        return bool(self._due_s)

    def short(self, session: SessionKey, now: float) -> None:
        """Its load has ended with less than it wanted."""
        pause_s = self._pauses_s.get(session, PAUSE_S)
        self._due_s[session] = now + pause_s
        self._pauses_s[session] = min(2 * pause_s, MOST_S)

    def forget(self, session: SessionKey) -> None:
        """A new hint of it has come, or none counts."""
        self._pauses_s.pop(session, None)
        self._due_s.pop(session, None)

    def due(self, now: float) -> list[SessionKey]:
        """Those to be begun again now, in the order in which they were cut."""
        due = [session for session, due_s in self._due_s.items() if due_s <= now]
        for session in due:
            del self._due_s[session]
        return due
