"""Decides which requests of a tenant share KV: the scope of a request.

Requests of one tenant and one scope match each other's cached prefixes; others never do, so neither `cached_tokens` nor
the time to the first token tells one user what another has written. The scope is a request's `cache_salt` on its way
to a worker, where it enters the keys of its chunks; sessions, their manifests and hints do not depend on it.

With `cache_scope: tenant`, the scope is the caller's `cache_salt`. With `user`, it is the user and the `cache_salt`. A
request that names no user shares KV within the session that it names; one that names neither shares nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from blake3 import blake3

from contracts.errors import InvalidRequest

#: Of a `cache_salt`.
MOST_SALT_CHARS = 1024
#: Fields that name the end user; the first that is present counts. OpenAI replaces `user` by `safety_identifier`.
USER_FIELDS = ("safety_identifier", "user")
#: Anthropic's, within `metadata`.
USER_ID = "user_id"


def user_of(data: Mapping[str, Any]) -> str:
    """A digest of the end user that a decoded body names; empty: none. Raises InvalidRequest naming a field that is no
    string."""
    for name in USER_FIELDS:
        if user := _text(name, data.get(name)):
            return _digest([user])
    metadata = data.get("metadata")
    if isinstance(metadata, dict) and (user := _text(f"metadata.{USER_ID}", metadata.get(USER_ID))):
        return _digest([user])
    return ""


def scope_of(user: str, cache_salt: str, *, per_user: bool, session_id: str = "", once: str = "") -> str:
    """The scope of a request; empty: all of its tenant. user: see `user_of`. session_id: that the caller names, or
    empty. once: a value that no other request has."""
    parts: list[list[str]] = []
    if per_user:
        parts.append(["user", user] if user else ["session", session_id] if session_id else ["once", once])
    if cache_salt:
        parts.append(["cache_salt", cache_salt])
    return _digest(parts) if parts else ""


def _text(name: str, value: Any) -> str:
    if value is not None and not isinstance(value, str):
        raise InvalidRequest(f"{name} must be a string", param=name, code="invalid_type")
    return value or ""


def _digest(parts: list[Any]) -> str:
    # JSON escapes halves of surrogate pairs.
    return blake3(json.dumps(parts).encode()).hexdigest(length=16)
