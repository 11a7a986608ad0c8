"""How a load gets the pieces of a chunk: it leases those that are here, joins those that are being brought, and plans
reads of the others."""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.core.deliveries import Deliveries
from kvstore.core.events import LoadKind, SourceKind
from kvstore.core.fetches import Fetches
from kvstore.core.index import Chunk
from kvstore.core.leases import Leases
from kvstore.core.load import StoreLoad
from kvstore.core.locating import Locating
from kvstore.core.prefetch import FetchRank, rank, reads
from kvstore.core.sources import Sources
from kvstore.core.state import PieceState
from kvstore.core.usefulness import Usefulness
from kvstore.core.waiting import Waiting


def rank_of(load: StoreLoad, layer: int = 0, i: int = 0) -> FetchRank:
    """The rank of a read of `layer` of chunk `i`."""
    return rank(
        load.kind,
        layer=layer,
        priority=load.priority,
        arrival=load.arrival,
        order=load.order,
        position=i,
        late=load.late,
    )


class Acquiring:
    """See the module."""

    def __init__(
        self,
        sources: Sources,
        fetches: Fetches,
        leases: Leases,
        waiting: Waiting,
        locating: Locating,
        deliveries: Deliveries,
        usefulness: Usefulness,
    ) -> None:
        self._sources, self._fetches, self._leases, self._waiting = sources, fetches, leases, waiting
        self._locating, self._deliveries, self._usefulness = locating, deliveries, usefulness

    def acquire(self, load: StoreLoad, i: int) -> bool:
        """Get chunk `i`: lease its READY pieces, join pieces that are being brought, plan reads of the others. With no
        known source ask the blob tier. False when that cannot help."""
        key, wanted = load.wants[i]
        chunk = self._sources.usable(load, key)
        if load.kind is LoadKind.ADVISED and chunk is not None and chunk.complete and i not in load.missing:
            return True  # a hint leases nothing
        layers = sorted(load.missing.get(i, wanted))
        absent, leased = self._join(load, i, chunk, layers) if chunk is not None and not chunk.idle else (layers, [])
        self._waiting.begin(load, i, absent)
        if not absent and not leased:
            return True
        source = self._sources.tier(load, chunk, len(absent) + len(leased)) if chunk else None
        if source is not None:
            # A load for a peer never waits for another peer's lease, or two nodes could wait for each other. The piece
            # is read here, for all loads.
            for layer in leased:
                self._leases.drop(key, layer)
            absent = sorted(absent + leased)
        if chunk is not None and source is not None:
            sums = chunk.ssd_expected if source is SourceKind.SSD else chunk.blob_sums
            for band in reads(load.shape, tuple(absent), source, load.kind):
                pieces = [(chunk, layer, 0, sums[layer]) for layer in band]
                self._fetches.plan(source, load.shape, pieces, rank_of(load, band[0], i), load.kind)
            return True
        return not (chunk and chunk.doomed) and self._locating.probe_again(load, key)

    def _join(self, load: StoreLoad, i: int, chunk: Chunk, layers: Iterable[int]) -> tuple[list[int], list[int]]:
        """Lease the READY pieces of chunk `i`, and wait for those that are being brought. Returns the layers of the
        ABSENT ones, and of those that a peer owes to others (EXPECTED) if this load may not wait for that."""
        absent: list[int] = []
        leased: list[int] = []
        for layer in layers:
            state = chunk.state(layer)
            if state is PieceState.READY:
                self._waiting.end(load, i, layer)
                self._usefulness.found(chunk, load.kind)
                self._deliveries.lease(load, i, layer, chunk)
                continue
            if state is PieceState.ABSENT:
                absent.append(layer)
                continue
            self._waiting.begin(load, i, (layer,))
            if state in (PieceState.QUEUED, PieceState.LOADING):
                self._fetches.lift(chunk.key, layer, rank_of(load, layer, i), load.kind)
            elif state is PieceState.EXPECTED and load.leading_only:
                self._leases.lift(chunk.key, layer, load.kind, load.priority)
            elif state is PieceState.EXPECTED:
                leased.append(layer)
        return absent, leased
