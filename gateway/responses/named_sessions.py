"""The sessions of the latest responses, which hints may name instead of their sessions. Pure."""

from __future__ import annotations

from collections import OrderedDict


class NamedSessions:
    """Invariants: at most `most` responses; `_of` has the responses of `_sessions` by session, and no empty set."""

    def __init__(self, most: int) -> None:
        self._most = most
        #: (tenant, response id) -> session, noted longest ago first.
        self._sessions: OrderedDict[tuple[str, str], str] = OrderedDict()
        #: (tenant, session) -> response ids.
        self._of: dict[tuple[str, str], set[str]] = {}

    def note(self, tenant: str, response_id: str, session: str) -> None:
        """The response is of this session. Beyond `most`, the one noted longest ago is forgotten."""
        self.drop(tenant, response_id)
        self._sessions[tenant, response_id] = session
        self._of.setdefault((tenant, session), set()).add(response_id)
        if len(self._sessions) > self._most:
            self.drop(*next(iter(self._sessions)))

    def session(self, tenant: str, response_id: str) -> str | None:
        """The response's session, if it is known."""
        return self._sessions.get((tenant, response_id))

    def drop(self, tenant: str, response_id: str) -> None:
        """Forget a response; an unknown one changes nothing."""
        session = self._sessions.pop((tenant, response_id), None)
        if session is not None:
            self._of[tenant, session].discard(response_id)
            if not self._of[tenant, session]:
                del self._of[tenant, session]

    def forget(self, tenant: str, session: str) -> None:
        """Forget a session's responses. Takes as long as it has responses, however many others have."""
        for response_id in self._of.pop((tenant, session), ()):
            del self._sessions[tenant, response_id]

    def validate(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        assert len(self._sessions) <= self._most and all(self._of.values())
        kept = {(tenant, one): session for (tenant, session), ids in self._of.items() for one in ids}
        assert kept == dict(self._sessions)
