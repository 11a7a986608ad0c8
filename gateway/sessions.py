"""Decides which session a request belongs to; the first of these that is present:

1. a header: `X-Session-Id`, or other systems' names for it (`core.spellings.HEADERS`);
2. the body's `session_id`, or other systems' names for it (`core.spellings.SESSION_FIELDS`);
3. the body's `prompt_cache_key`, hashed if it is no valid session id, because OpenAI allows any characters;
4. the conversation so far (`core.implicit`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from blake3 import blake3

from contracts.errors import InvalidRequest
from contracts.ids import SessionKey, check_session_id
from gateway.core.implicit import History, ImplicitSessions
from gateway.core.scopes import scope_of
from gateway.core.spellings import session_of


@dataclass(frozen=True, slots=True)
class Resolved:
    """A request's session. history: set when the history named the session, so the turn's end must be remembered."""

    key: SessionKey
    history: History | None = None

    def scope(self, user: str, cache_salt: str, *, per_user: bool) -> str:
        """The scope of the request's KV (`core.scopes`). Without a user and a name for the session, it is the
        request's own."""
        named = "" if self.history is not None else self.key.session_id
        return scope_of(user, cache_salt, per_user=per_user, session_id=named, once=secrets.token_hex(16))


class Sessions:
    """Resolves sessions; remembers implicit ones."""

    def __init__(self) -> None:
        self.implicit = ImplicitSessions()

    def resolve(self, tenant: str, said: str | None, history: History | None) -> Resolved:
        """The session of a request. said: the result of `stated`; history: required when that is None."""
        if said is not None:
            return Resolved(SessionKey(tenant, said))
        assert history is not None
        return Resolved(SessionKey(tenant, self.implicit.resolve(history, secrets.token_hex(4))), history)

    def remember(self, session: Resolved, end: Callable[[History], bytes | None]) -> None:
        """A turn ended; `end` computes the hash of its history (`core.implicit`)."""
        if session.history is not None:
            self.implicit.remember(end(session.history), session.key.session_id)


def stated(
    headers: Mapping[str, str], session_id: str | None, cache_key: str | None, spelled: str | None = None
) -> str | None:
    """The session id that the caller states, or None. spelled: the session id from another system's field, already
    checked. Raises InvalidRequest naming the field or header of an invalid id."""
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
            hashed = blake3(cache_key.encode("utf-8", "surrogatepass"))
            return f"pck-{hashed.hexdigest()[:32]}"
    return None
