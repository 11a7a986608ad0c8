"""Whether a loopback port is free."""

from __future__ import annotations

import socket


def is_free(port: int) -> bool:
    """Whether nobody listens there just now."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
