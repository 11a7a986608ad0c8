"""Names of things that cross a process boundary, and the one place where they are checked."""

from __future__ import annotations

import re
from typing import NamedTuple, NewType

from contracts.errors import InvalidRequest

NodeId = NewType("NodeId", str)
RequestId = NewType("RequestId", str)

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
    """`value` when it is a legal session id. Raises InvalidRequest naming `param` otherwise."""
    return check_name(value, param, "invalid_session_id")


def check_name(value: object, param: str, code: str = "invalid_value") -> str:
    """`value` when it is a name of the form of a session id: of a workflow, an agent, a run. Raises InvalidRequest naming `param`."""
    if not isinstance(value, str) or not _SESSION_ID.fullmatch(value) or _ONLY_DOTS.fullmatch(value):
        raise InvalidRequest(
            f"{param} must match {SESSION_ID_PATTERN} and not consist of dots alone; got {str(value)[:60]!r}",
            param=param,
            code=code,
        )
    return value
