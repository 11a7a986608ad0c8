"""The seam between nodes: how a reader gets pieces out of a peer's arena into its own.

Leases are agreed over gRPC (node.py); a transport only moves bytes. Both implementations pass tests/kvstore/test_transport.py.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

#: (offset in the peer's arena, offset in ours, bytes). No class of its own, as a load makes thousands of them.
PeerRange = tuple[int, int, int]
GivenUp = Callable[[], bool]


def never() -> bool:
    """Of reads that nobody gives up."""
    return False


class Card(NamedTuple):
    """How one store's arena can be read (proto: PeerCard)."""

    node: str
    instance: str
    nixl_metadata: bytes
    arena_base: int
    arena_bytes: int
    socket_address: str


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
        """`card` with what a peer needs to read here."""
        ...

    async def read(self, peer: Card, lease: str, ranges: Sequence[PeerRange], given_up: GivenUp = never) -> bool:
        """Bring the ranges; false when they did not come. On return nothing writes to our arena any more.

        given_up: asked now and then, from any thread; once it is true the read ends as soon as the transport can let go of it.
        """
        ...

    async def forget(self, peer: Card) -> None:
        """The peer is gone or has been restarted."""
        ...

    async def stop(self) -> None:
        """Release everything."""
        ...


class LeasedRanges:
    """Which ranges of this node's arena which lease may read: what the socket transport checks. Safe between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranges: dict[str, dict[int, int]] = {}
        #: Called when a peer is about to read.
        self.opened: Callable[[], None] = lambda: None

    def open(self, lease: str) -> None:
        """A new lease, without ranges."""
        with self._lock:
            self._ranges.setdefault(lease, {})
        self.opened()

    def add(self, lease: str, ranges: Iterable[tuple[int, int]]) -> None:
        """The lease may read these (offset, length)."""
        with self._lock, contextlib.suppress(KeyError):
            self._ranges[lease].update(ranges)

    def close(self, lease: str) -> None:
        """The lease ended."""
        with self._lock:
            self._ranges.pop(lease, None)

    def allowed(self, lease: str, offset: int, length: int) -> bool:
        """Whether this very range is leased to it."""
        with self._lock:
            return self._ranges.get(lease, {}).get(offset) == length

    @property
    def count(self) -> int:
        """Leases that are open."""
        with self._lock:
            return len(self._ranges)
