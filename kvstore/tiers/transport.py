"""Moves bytes between nodes: the interface by which a reader copies pieces from a peer's arena into its own.

Leases are agreed over gRPC (lending.py, peers.py). Both implementations pass tests/kvstore/test_transport.py.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

#: (offset in the peer's arena, offset in ours, bytes). A plain tuple, because a load makes thousands.
PeerRange = tuple[int, int, int]
GivenUp = Callable[[], bool]


def never() -> bool:
    """The `given_up` of reads that are never given up."""
    return False


class Card(NamedTuple):
    """How one store's arena can be read (proto: PeerCard)."""

    node: str
    instance: str
    nixl_metadata: bytes
    arena_base: int
    arena_bytes: int
    socket_address: str
    local_name: str = ""


class Transport(Protocol):
    """See the module."""

    @property
    def name(self) -> str:
        """For logs."""
        ...

    async def start(self) -> None:
        """Return when peers can read."""
        ...

    def fill(self, card: Card) -> Card:
        """`card`, completed with what a peer needs to read from here."""
        ...

    async def read(self, peer: Card, lease: str, ranges: Sequence[PeerRange], given_up: GivenUp = never) -> bool:
        """Copy the ranges; false when that failed. On return nothing writes to our arena any more.

        given_up: polled, from any thread; once true, the read ends as soon as the transport can stop it.
        """
        ...

    async def forget(self, peer: Card) -> None:
        """The peer is gone or was restarted."""
        ...

    async def stop(self) -> None:
        """Release everything."""
        ...


class LeasedRanges:
    """Which ranges of this node's arena each lease may read, and which node may. The socket transport checks it.
    Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranges: dict[str, dict[int, int]] = {}
        self._readers: dict[str, str] = {}
        #: Called when a lease is opened.
        self.opened: Callable[[], None] = lambda: None

    def open(self, lease: str, reader: str) -> None:
        """Open a lease without ranges for the node `reader`."""
        with self._lock:
            self._ranges.setdefault(lease, {})
            self._readers[lease] = reader
        self.opened()

    def add(self, lease: str, ranges: Iterable[tuple[int, int]]) -> None:
        """Allow the lease to read these (offset, length)."""
        with self._lock, contextlib.suppress(KeyError):
            self._ranges[lease].update(ranges)

    def close(self, lease: str) -> None:
        """The lease ended."""
        with self._lock:
            self._ranges.pop(lease, None)
            self._readers.pop(lease, None)

    def reader(self, lease: str) -> str | None:
        """The node that an open lease is for."""
        with self._lock:
            return self._readers.get(lease)

    def allowed(self, lease: str, offset: int, length: int) -> bool:
        """Whether exactly this range is leased to it."""
        with self._lock:
            return self._ranges.get(lease, {}).get(offset) == length

    @property
    def count(self) -> int:
        """Number of open leases."""
        with self._lock:
            return len(self._ranges)
