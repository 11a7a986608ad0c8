"""What every test gets: ports that nobody listens on."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from itertools import count

import pytest

#: Below the kernel's ephemeral ports, so that no outgoing connection takes one in between.
_FIRST, _LAST = 12_000, 20_000
_turn = count()


@pytest.fixture
def free_ports() -> Callable[[int], int]:
    """A function: the first of so many consecutive free loopback ports, never the same twice in a run."""

    def find(wanted: int) -> int:
        for _ in range(1000):
            first = _FIRST + (os.getpid() * 131 + next(_turn) * 60) % (_LAST - _FIRST - wanted)
            if all(_is_free(port) for port in range(first, first + wanted)):
                return first
        raise AssertionError(f"no {wanted} consecutive free ports")

    return find


def _is_free(port: int) -> bool:
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
