"""Small real tiers: the simplest thing that keeps each interface's guarantees, with a way to make it fail.

They pass the same suites as the real ones (test_file_io.py, test_transport.py); the blob tier's is obstore's
MemoryStore.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Sequence
from typing import ClassVar

from contracts.errors import PieceLost
from kvstore.tiers.arena import Arena
from kvstore.tiers.file_io import FileIo, Moving, Operation, Part
from kvstore.tiers.transport import Card, GivenUp, LeasedRanges, PeerRange, never


class _Moved:
    """A transfer that ends at the second look, as the kernel's does."""

    def __init__(self) -> None:
        self._looks = 0

    def ended(self) -> bool:
        self._looks += 1
        return self._looks > 1


class FakeFileIo(FileIo):
    """One plain call a part. `error`: raised by every call while it is set."""

    threads = 1
    depth = 3

    def __init__(self, arena: Arena) -> None:
        self._view = arena.view
        self.error: OSError | None = None

    def begin(self, operation: Operation, fd: int, parts: Sequence[Part], header: bytes = b"") -> Moving:
        if self.error is not None:
            raise self.error
        if header:
            page = mmap.mmap(-1, len(header))
            page[:] = header
            os.pwritev(fd, [page], 0)
        for p in parts:
            piece = self._view[p.arena_offset : p.arena_offset + p.length]
            moved = (
                os.preadv(fd, [piece], p.file_offset) if operation == "READ" else os.pwritev(fd, [piece], p.file_offset)
            )
            if moved < p.length:
                raise (
                    PieceLost("short file")
                    if operation == "READ"
                    else OSError(f"{moved} of {p.length} bytes were written")
                )
        return _Moved()


class FakeTransport:
    """Copies between arenas of one process. `cut`: reads fail, as over a link that is down; `hold`: they wait until it
    is set."""

    name = "fake"
    _owners: ClassVar[dict[str, FakeTransport]] = {}

    def __init__(self, arena: Arena, leases: LeasedRanges, address: str) -> None:
        self._arena = arena
        self._leases = leases
        self._address = address
        self._stopped = asyncio.Event()
        self.cut = False
        self.hold = asyncio.Event()
        self.hold.set()

    async def start(self) -> None:
        if self._address in self._owners:
            raise OSError(f"{self._address} is taken")
        self._owners[self._address] = self

    def fill(self, card: Card) -> Card:
        return card._replace(socket_address=self._address)

    async def read(self, peer: Card, lease: str, ranges: Sequence[PeerRange], given_up: GivenUp = never) -> bool:
        waits = [asyncio.ensure_future(self.hold.wait()), asyncio.ensure_future(self._stopped.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        owner = self._owners.get(peer.socket_address)
        if self.cut or self._stopped.is_set() or owner is None or given_up():
            return False
        if not all(owner._leases.allowed(lease, there, length) for there, _, length in ranges):
            return False
        for there, here, length in ranges:
            self._arena.view[here : here + length] = owner._arena.view[there : there + length]
        return True

    async def forget(self, peer: Card) -> None:
        """Nothing is remembered."""

    async def stop(self) -> None:
        self._stopped.set()
        self._owners.pop(self._address, None)
