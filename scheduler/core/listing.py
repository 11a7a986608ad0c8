"""Pages of a tenant's sessions, most recently used first or by id.

By id, a page may begin after any id, known or not, and the pages together contain every session that existed
throughout. By last use the order changes between pages: a page begins where `after` is now, and a session used
meanwhile may be missed.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from contracts.ids import SessionKey
from scheduler.core.directory import Directory, Session


class Page:
    """One page, found in parts: `begin`, then `look` at all sessions, then `found`.

    tenant: empty for all tenants. limit: sessions on the page. Memory: the sessions of one `look` and the page.
    """

    def __init__(self, tenant: str, limit: int, after: str, *, by_id: bool) -> None:
        self._tenant = tenant
        self._limit = limit
        self._after = after
        self._by_id = by_id
        self._place: tuple[float, str, str] | None = None
        self._found: list[tuple[tuple[float, str, str], Session]] = []

    def begin(self, directory: Directory) -> bool:
        """Find where the page begins. False if `after` is an unknown session (never by id)."""
        if not self._after:
            return True
        if self._by_id:
            self._place = (0.0, self._after, self._tenant)
            return True
        known = directory.get(SessionKey(self._tenant, self._after))
        self._place = self._order(known) if known is not None else None
        return known is not None

    def look(self, sessions: Iterable[Session]) -> None:
        """Add those of `sessions` that belong on the page."""
        wanted = ((self._order(s), s) for s in sessions if not self._tenant or s.key.tenant == self._tenant)
        later = [(order, s) for order, s in wanted if self._place is None or order > self._place]
        self._found = heapq.nsmallest(self._limit, [*self._found, *later], key=lambda entry: entry[0])

    def found(self) -> list[Session]:
        """The page's sessions, in order."""
        return [session for _, session in self._found]

    def _order(self, session: Session) -> tuple[float, str, str]:
        return (0.0 if self._by_id else -session.last_use_s), session.key.session_id, session.key.tenant
