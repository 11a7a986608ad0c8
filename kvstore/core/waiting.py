"""Which loads wait for which piece. A piece that no load waits for any more is not brought.

Invariant (`validate`): a load is listed under a piece exactly when the piece is in its `missing`.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.core.events import LoadId
from kvstore.core.fetches import Fetches
from kvstore.core.index import Index
from kvstore.core.leases import Leases
from kvstore.core.load import StoreLoad
from kvstore.core.state import PieceState


class Waiting:
    """See the module."""

    def __init__(self, index: Index, fetches: Fetches, leases: Leases) -> None:
        self._index = index
        self._fetches = fetches
        self._leases = leases
        self._waiting: dict[tuple[bytes, int], dict[LoadId, None]] = {}

    def of(self, key: bytes, layer: int) -> list[LoadId]:
        """The loads that wait for the piece, oldest first."""
        return list(self._waiting.get((key, layer), ()))

    def begin(self, load: StoreLoad, i: int, layer: int) -> None:
        """The load waits for the piece. Idempotent."""
        load.missing.setdefault(i, set()).add(layer)
        self._waiting.setdefault((load.wants[i][0], layer), {})[load.ident] = None

    def end(self, load: StoreLoad, i: int, layer: int) -> None:
        """The load no longer waits for the piece. Idempotent."""
        layers = load.missing.get(i)
        if layers is None or layer not in layers:
            return
        layers.discard(layer)
        if not layers:
            del load.missing[i]
        piece = (load.wants[i][0], layer)
        waiting = self._waiting[piece]
        del waiting[load.ident]
        if not waiting:
            del self._waiting[piece]

    def leave(self, load: StoreLoad, i: int) -> None:
        """The load wants nothing more of chunk `i`. Pieces no other load waits for are taken out of their fetch or
        lease."""
        key = load.wants[i][0]
        for layer in list(load.missing.get(i, ())):
            self.end(load, i, layer)
            if (key, layer) not in self._waiting:
                self._abandon(key, layer)

    def _abandon(self, key: bytes, layer: int) -> None:
        chunk = self._index.chunks.get(key)
        state = chunk.state(layer) if chunk else PieceState.ABSENT
        if chunk is not None and state is PieceState.QUEUED:
            self._fetches.drop(chunk, layer)
        elif state is PieceState.EXPECTED:
            self._leases.drop(key, layer)

    def validate(self, loads: Iterable[StoreLoad]) -> None:
        """Raise AssertionError when the invariant does not hold."""
        waiting: dict[tuple[bytes, int], set[LoadId]] = {}
        for load in loads:
            for i, layers in load.missing.items():
                for layer in layers:
                    waiting.setdefault((load.wants[i][0], layer), set()).add(load.ident)
        assert waiting == {piece: set(idents) for piece, idents in self._waiting.items()}
