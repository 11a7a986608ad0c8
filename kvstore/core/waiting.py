"""Which loads wait for which piece. A piece that no load waits for any more is not brought.

Invariant (`validate`): a load is listed under a piece exactly when the piece is in its `missing`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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

    def begin(self, load: StoreLoad, i: int, layers: Sequence[int]) -> None:
        """The load waits for these pieces of chunk `i`. Idempotent."""
        if layers:
            load.missing.setdefault(i, set()).update(layers)
        key = load.wants[i][0]
        for layer in layers:
            self._waiting.setdefault((key, layer), {})[load.ident] = None

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
        key, unwanted = load.wants[i][0], []
        for layer in load.missing.pop(i, ()):
            waiting = self._waiting[key, layer]
            del waiting[load.ident]
            if not waiting:
                del self._waiting[key, layer]
                unwanted.append(layer)
        chunk = self._index.chunks.get(key)
        if chunk is None:
            return
        states = [(layer, chunk.state(layer)) for layer in unwanted]
        self._fetches.drop(chunk, [layer for layer, state in states if state is PieceState.QUEUED])
        for layer in (layer for layer, state in states if state is PieceState.EXPECTED):
            self._leases.drop(key, layer)

    def validate(self, loads: Iterable[StoreLoad]) -> None:
        """Raise AssertionError when the invariant does not hold."""
        waiting: dict[tuple[bytes, int], set[LoadId]] = {}
        for load in loads:
            for i, layers in load.missing.items():
                for layer in layers:
                    waiting.setdefault((load.wants[i][0], layer), set()).add(load.ident)
        assert waiting == {piece: set(idents) for piece, idents in self._waiting.items()}
