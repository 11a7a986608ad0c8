"""Which session a request belongs to: what the caller says, in the order below, else what its history says.

1. a header: `X-Session-Id`, or the names that other systems' clients send already (`HEADERS`);
2. the body's `session_id`;
3. the body's `prompt_cache_key`. OpenAI puts no limits on its characters, so one that is no session id is hashed into one;
4. implicitly, by the conversation so far (`core.implicit`).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from blake3 import blake3

from contracts.errors import InvalidRequest
from contracts.ids import SessionKey, check_session_id
from gateway.core.implicit import History, ImplicitSessions

#: In order of precedence. The first is ours; then Open WebUI, LiteLLM, Dynamo, coding agents, and habits.
HEADERS = (
    "X-Session-Id",
    "X-Upbeat-Session",
    "X-OpenWebUI-Chat-Id",
    "X-Conversation-Id",
    "X-LiteLLM-Session-Id",
    "X-Dynamo-Session-Id",
    "X-Session-Affinity",
    "X-Opencode-Session",
    "X-Chat-Id",
    "X-Thread-Id",
    "Session-Id",
    "session_id",
    "conversation_id",
)


@dataclass(frozen=True, slots=True)
class Resolved:
    """A request's session. `implicit`: the history named it, so its end must be remembered."""

    key: SessionKey
    implicit: bool


class Sessions:
    """Resolves sessions; remembers implicit ones."""

    def __init__(self) -> None:
        self.implicit = ImplicitSessions()

    def resolve(self, tenant: str, headers: Mapping[str, str], session_id: str | None, cache_key: str | None, history: History) -> Resolved:
        """The session of a request. Raises InvalidRequest naming the header or field that holds no session id."""
        said = stated(headers, session_id, cache_key)
        if said is not None:
            return Resolved(SessionKey(tenant, said), implicit=False)
        return Resolved(SessionKey(tenant, self.implicit.resolve(history, secrets.token_hex(4))), implicit=True)

    def remember(self, session: Resolved, end: bytes | None) -> None:
        """A turn ended; `end` names its history (`core.implicit`)."""
        if session.implicit:
            self.implicit.remember(end, session.key.session_id)


def stated(headers: Mapping[str, str], session_id: str | None, cache_key: str | None) -> str | None:
    """The session id that the caller states, or None. Raises InvalidRequest naming where a bad one stands."""
    for name in HEADERS:
        value = headers.get(name)
        if value is not None:
            return check_session_id(value, name)
    if session_id is not None:
        return check_session_id(session_id, "session_id")
    if cache_key:
        try:
            return check_session_id(cache_key, "prompt_cache_key")
        except InvalidRequest:
            return f"pck-{blake3(cache_key.encode()).hexdigest()[:32]}"
    return None
