"""Small real tiers: the simplest thing that keeps each seam's promises, with a way to make it fail.

They pass the same suites as the real ones (test_file_io.py, test_transport.py); the blob tier's is obstore's MemoryStore.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import ClassVar

from contracts.errors import PieceLost
from kvstore.tiers.arena import Arena
from kvstore.tiers.file_io import Part
from kvstore.tiers.transport import Card, LeasedRanges, PeerRange


class FakeFileIo:
    """One plain call a part. `error`: raised by every call while it is set."""

    threads = 1

    def __init__(self, arena: Arena) -> None:
        self._view = arena.view
        self.error: OSError | None = None

    def read(self, fd: int, parts: Sequence[Part]) -> None:
        self._maybe_fail()
        for p in parts:
            data = os.pread(fd, p.length, p.file_offset)
            if len(data) < p.length:
                raise PieceLost("short file")
            self._view[p.arena_offset : p.arena_offset + p.length] = data

    def write(self, fd: int, parts: Sequence[Part]) -> None:
        self._maybe_fail()
        for p in parts:
            written = os.pwrite(fd, self._view[p.arena_offset : p.arena_offset + p.length], p.file_offset)
            if written < p.length:
                raise OSError(f"{written} of {p.length} bytes were written")

    def _maybe_fail(self) -> None:
        if self.error is not None:
            raise self.error


class FakeTransport:
    """Copies between arenas of one process. `cut`: reads fail, as over a link that is down; `hold`: they wait until it is set."""

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

    async def read(self, peer: Card, lease: str, ranges: Sequence[PeerRange]) -> bool:
        waits = [asyncio.ensure_future(self.hold.wait()), asyncio.ensure_future(self._stopped.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        owner = self._owners.get(peer.socket_address)
        if self.cut or self._stopped.is_set() or owner is None:
            return False
        if not all(owner._leases.allowed(lease, r.remote_offset, r.length) for r in ranges):
            return False
        for r in ranges:
            data = owner._arena.view[r.remote_offset : r.remote_offset + r.length]
            self._arena.view[r.local_offset : r.local_offset + r.length] = data
        return True

    async def forget(self, peer: Card) -> None:
        """Nothing is remembered."""

    async def stop(self) -> None:
        self._stopped.set()
        self._owners.pop(self._address, None)
