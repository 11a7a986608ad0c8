"""Ids and names that cross process boundaries, and their validation."""

from __future__ import annotations

import re
from typing import NamedTuple

from contracts.errors import InvalidRequest

SESSION_ID_PATTERN = r"[A-Za-z0-9._:-]{1,128}"
_SESSION_ID = re.compile(SESSION_ID_PATTERN)
_ONLY_DOTS = re.compile(r"\.+")

#: The tenant of callers on an open (key-less, loopback-only) server.
DEFAULT_TENANT = "default"


class SessionKey(NamedTuple):
    """A session within its tenant: the key of every table of sessions."""

    tenant: str
    session_id: str

    def __str__(self) -> str:
        return f"{self.tenant}/{self.session_id}"


def check_session_id(value: object, param: str = "session_id") -> str:
    """Returns `value` if it is a valid session id. Raises InvalidRequest naming `param` otherwise."""
    return check_name(value, param, "invalid_session_id")


def check_name(value: object, param: str, code: str = "invalid_value") -> str:
    """Returns `value` if it is a valid name (of a workflow, agent or run; the rules of session ids). Raises
    InvalidRequest naming `param`."""
    if not isinstance(value, str) or not _SESSION_ID.fullmatch(value) or _ONLY_DOTS.fullmatch(value):
        raise InvalidRequest(
            f"{param} must match {SESSION_ID_PATTERN} and not consist of dots alone; got {str(value)[:60]!r}",
            param=param,
            code=code,
        )
    return value
