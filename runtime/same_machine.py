"""Sockets between processes of one user on one machine: as safe as TLS there, and without its cost.

An abstract Unix socket has a name and no file. Both sides ask the kernel for the other's user (SO_PEERCRED), so another
user who learns or takes the name gets nothing.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import sys

_CREDENTIALS = struct.Struct("iII")
_NAME_LENGTH = 100


def listening(name: str = "") -> tuple[socket.socket, str] | None:
    """A socket that listens, and the name by which `connected` reaches it; None where the system has none, or somebody
    has the name. name: a random one unless given."""
    if sys.platform != "linux":
        return None
    name = name or f"upbeat-{secrets.token_hex(16)}"
    made = socket.socket(socket.AF_UNIX)
    try:
        made.bind("\0" + name)
        made.listen(64)
    except OSError:
        made.close()
        return None
    return made, name


def connected(name: str, timeout_s: float) -> socket.socket | None:
    """A connection to that socket; None if it is not on this machine, or another user's."""
    if not name or len(name) > _NAME_LENGTH or not name.isascii() or sys.platform != "linux":
        return None
    made = socket.socket(socket.AF_UNIX)
    try:
        made.settimeout(timeout_s)
        made.connect("\0" + name)
        if is_own(made):
            return made
    except OSError:
        pass
    made.close()
    return None


def is_own(connection: socket.socket) -> bool:
    """Whether the other side is a process of this user."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(found)[1] == os.geteuid())
