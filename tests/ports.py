"""Loopback ports that nobody listens on. Each process that runs tests has a block of them to itself, so that a port
which a test frees for a service is not another process's meanwhile."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

from loadtest.ports import is_free

#: Below those of loadtest.stack and the kernel's ephemeral ones, so that nothing takes one in between.
_FIRST, _BLOCK, _BLOCKS = 12_000, 800, 10


class _Ports:
    """This process's block, in turn from its start: a freed port comes again only after all others."""

    def __init__(self) -> None:
        folder = Path(tempfile.gettempdir()) / f"upbeat-test-ports-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        for block in range(_BLOCKS):
            self._lock = (folder / str(block)).open("w")  # held until the process ends
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._lock.close()
                continue
            self._first = self._next = _FIRST + block * _BLOCK
            return
        raise AssertionError(f"{_BLOCKS} processes run tests already: end some of them")

    def take(self, wanted: int) -> int:
        for _ in range(_BLOCK):
            if self._next + wanted > self._first + _BLOCK:
                self._next = self._first
            first = self._next
            taken = next((port for port in range(first, first + wanted) if not is_free(port)), None)
            self._next = first + wanted if taken is None else taken + 1
            if taken is None:
                return first
        raise AssertionError(f"no {wanted} consecutive free ports")


def free_ports(wanted: int) -> int:
    """The first of so many consecutive free ports."""
    global _ports
    _ports = _ports or _Ports()
    return _ports.take(wanted)


_ports: _Ports | None = None
