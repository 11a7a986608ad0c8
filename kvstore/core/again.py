"""When a hint's load that ended incomplete for lack of room is tried again.

Room appears as requests end and saves are written. So the load is retried while its hint counts, first after `PAUSE_S`,
then after twice as long each time, up to `MOST_S`. `hints` skips retries while most of what hints bring is wasted.
"""

from __future__ import annotations

from collections.abc import Callable, Set

from contracts.ids import SessionKey

PAUSE_S, MOST_S = 0.25, 4.0
#: Most loads retried at a time, and about the most chunks of theirs. The others stay due, before those cut later.
MOST_AT_ONCE, MOST_CHUNKS = 64, 4096


class Again:
    """See the module. Times are monotonic seconds. `forget` a session when its hint no longer counts."""

    def __init__(self) -> None:
        self._pauses_s: dict[SessionKey, float] = {}  #: by session, the pause before its next retry
        self._due_s: dict[SessionKey, float] = {}

    @property
    def sessions(self) -> Set[SessionKey]:
        """Sessions whose load was cut at least once."""
        return self._pauses_s.keys()

    @property
    def waiting(self) -> bool:
        """Whether a retry is pending."""
        return bool(self._due_s)

    def short(self, session: SessionKey, now: float) -> None:
        """The session's load ended incomplete: schedule a retry."""
        pause_s = self._pauses_s.get(session, PAUSE_S)
        self._due_s[session] = now + pause_s
        self._pauses_s[session] = min(2 * pause_s, MOST_S)

    def forget(self, session: SessionKey) -> None:
        """A new hint came, or the hint no longer counts."""
        self._pauses_s.pop(session, None)
        self._due_s.pop(session, None)

    def due(self, now: float, chunks: Callable[[SessionKey], int] = lambda session: 1) -> list[SessionKey]:
        """Remove and return the sessions to retry now, in the order in which they were cut, as far as `MOST_AT_ONCE`
        and `MOST_CHUNKS` allow. chunks: of a session."""
        due: list[SessionKey] = []
        looked = 0
        for session, due_s in self._due_s.items():
            if len(due) >= MOST_AT_ONCE or looked >= MOST_CHUNKS:
                break
            if due_s <= now:
                due.append(session)
                looked += chunks(session)
        for session in due:
            del self._due_s[session]
        return due
