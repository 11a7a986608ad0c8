"""Which session a request belongs to: what the caller says, in the order below, else what its history says.

1. a header: `X-Session-Id`, or the names that other systems' clients send already (`core.spellings.HEADERS`);
2. the body's `session_id`, or what other systems call it (`core.spellings.SESSION_FIELDS`);
3. the body's `prompt_cache_key`. OpenAI puts no limits on its characters, so one that is no session id is hashed into one;
4. implicitly, by the conversation so far (`core.implicit`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from blake3 import blake3

from contracts.errors import InvalidRequest
from contracts.ids import SessionKey, check_session_id
from gateway.core.implicit import History, ImplicitSessions
from gateway.core.spellings import session_of


@dataclass(frozen=True, slots=True)
class Resolved:
    """A request's session. history: set when the history named it, so that its end must be remembered."""

    key: SessionKey
    history: History | None = None


class Sessions:
    """Resolves sessions; remembers implicit ones."""

    def __init__(self) -> None:
        self.implicit = ImplicitSessions()

    def resolve(self, tenant: str, said: str | None, history: History | None) -> Resolved:
        """The session of a request. said: what `stated` found; history: needed when nothing is stated."""
        if said is not None:
            return Resolved(SessionKey(tenant, said))
        assert history is not None
        return Resolved(SessionKey(tenant, self.implicit.resolve(history, secrets.token_hex(4))), history)

    def remember(self, session: Resolved, end: Callable[[History], bytes | None]) -> None:
        """A turn ended; `end` names its history (`core.implicit`)."""
        if session.history is not None:
            self.implicit.remember(end(session.history), session.key.session_id)


def stated(headers: Mapping[str, str], session_id: str | None, cache_key: str | None, spelled: str | None = None) -> str | None:
    """The session id that the caller states, or None. spelled: what the body says in another system's words, checked. Raises InvalidRequest
    naming where a bad one stands."""
    named = session_of(headers)
    if named is not None:
        return named
    if session_id is not None:
        return check_session_id(session_id, "session_id")
    if spelled is not None:
        return spelled
    if cache_key:
        try:
            return check_session_id(cache_key, "prompt_cache_key")
        except InvalidRequest:
            return f"pck-{blake3(cache_key.encode()).hexdigest()[:32]}"
    return None
