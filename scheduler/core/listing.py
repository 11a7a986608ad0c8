"""Pages of a tenant's sessions: the latest used first, or by id.

By id a page begins after any id, whether it is known or not, and all pages together have every session that was there all the time. The
other order changes as sessions are used: a page begins at the place that `after` has now, and a session that was used meanwhile may be
missed, as it is among the first again.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from contracts.ids import SessionKey
from scheduler.core.directory import Directory, Session


class Page:
    """One page, found in parts. `tenant` empty: of all. limit: sessions. Memory: those that are looked at, and the page."""

    def __init__(self, tenant: str, limit: int, after: str, *, by_id: bool) -> None:
        self._tenant = tenant
        self._limit = limit
        self._after = after
        self._by_id = by_id
        self._place: tuple[float, str, str] | None = None
        self._found: list[tuple[tuple[float, str, str], Session]] = []

    def begin(self, directory: Directory) -> bool:
        """Find the place after which the page begins. False: there is none."""
        if not self._after:
            return True
        if self._by_id:
            self._place = (0.0, self._after, self._tenant)
            return True
        known = directory.get(SessionKey(self._tenant, self._after))
        self._place = self._order(known) if known is not None else None
        return known is not None

    def look(self, sessions: Iterable[Session]) -> None:
        """Some of all sessions."""
        wanted = ((self._order(s), s) for s in sessions if not self._tenant or s.key.tenant == self._tenant)
        later = [(order, s) for order, s in wanted if self._place is None or order > self._place]
        self._found = heapq.nsmallest(self._limit, [*self._found, *later], key=lambda entry: entry[0])

    def found(self) -> list[Session]:
        """The page, in order."""
        return [session for _, session in self._found]

    def _order(self, session: Session) -> tuple[float, str, str]:
        return (0.0 if self._by_id else -session.last_use_s), session.key.session_id, session.key.tenant
