"""Which source a load reads a chunk from: the one estimated to bring it soonest. Changes nothing but `load.sources`.

Candidates, in the order that ties keep: the own SSD, a peer's arena, a peer's SSD, the blob tier. Degraded tiers
(health.py) are left out, and so are sources that already failed for this load.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from kvstore.core.events import SourceKind
from kvstore.core.index import Chunk, Index
from kvstore.core.load import StoreLoad
from kvstore.core.meter import Meter
from kvstore.core.prefetch import OPTIONAL, is_late
from kvstore.core.rates import BLOB, SSD, Source
from kvstore.core.state import CopyState, PieceState

#: States that a load for a peer may wait in: never EXPECTED, or two nodes could wait for each other.
_OWN = (PieceState.QUEUED, PieceState.LOADING, PieceState.SAVING, PieceState.READY)
COMING = (*_OWN, PieceState.EXPECTED)


class Sources:
    """See the module."""

    def __init__(self, index: Index, meter: Meter) -> None:
        self._index = index
        self._meter = meter

    def usable(self, load: StoreLoad, key: bytes) -> Chunk | None:
        """The chunk's record; None when it is unknown, erased, or of another shape."""
        chunk = self._index.chunks.get(key)
        if chunk is None or chunk.doomed:
            return None
        return chunk if chunk.shape is load.shape or chunk.shape == load.shape else None

    def coming(self, load: StoreLoad, i: int) -> bool:
        """Whether the wanted pieces are in the arena or being brought."""
        key, layers = load.wants[i]
        chunk = self.usable(load, key)
        states = COMING if load.leading_only else _OWN
        if chunk is None or chunk.idle:
            return False
        return chunk.complete or all(chunk.state(layer) in states for layer in layers)

    def near(self, load: StoreLoad, i: int) -> bool:
        """Whether the wanted pieces are in the arena, being brought, or can be read from the own SSD."""
        if self.coming(load, i):
            return True
        chunk = self.usable(load, load.wants[i][0])
        return chunk is not None and SSD in self._tiers(load, chunk)

    def obtainable(self, load: StoreLoad, i: int) -> bool:
        """Whether a known source can bring the chunk."""
        if self.near(load, i):
            return True
        chunk = self.usable(load, load.wants[i][0])
        return chunk is not None and bool(self._tiers(load, chunk))

    def ready(self, load: StoreLoad, i: int) -> bool:
        """Whether every wanted piece is READY."""
        chunk = self.usable(load, load.wants[i][0])
        if chunk is None or chunk.idle:
            return False
        return chunk.complete or all(chunk.state(layer) is PieceState.READY for layer in load.wants[i][1])

    def expected(self, load: StoreLoad, indices: Iterable[int]) -> tuple[SourceKind | None, ...]:
        """By chunk, the source its pieces are expected from; None: they are in the arena, or no source is known."""
        return tuple(self._expected(load, i) for i in indices)

    def _expected(self, load: StoreLoad, i: int) -> SourceKind | None:
        chunk = self.usable(load, load.wants[i][0])
        if chunk is None or self.ready(load, i):
            return None
        if not chunk.idle and any(chunk.state(layer) is PieceState.EXPECTED for layer in load.wants[i][1]):
            return SourceKind.PEER
        return self.tier(load, chunk, len(load.wants[i][1]))

    def absent(self, load: StoreLoad, i: int) -> tuple[int, ...]:
        """The wanted layers that are ABSENT."""
        key, layers = load.wants[i]
        chunk = self.usable(load, key)
        if chunk is None or chunk.idle:
            return layers
        return tuple(layer for layer in layers if chunk.state(layer) is PieceState.ABSENT)

    def own_first(self, load: StoreLoad) -> bool:
        """Whether the own SSD is read before any peer is asked."""
        size = sum(len(layers) for _, layers in load.wants) * load.shape.piece_bytes
        peers = (Source(SourceKind.PEER, name) for name in load.sources)
        return not any(self._meter.rates.sooner(SSD, peer, size, self._meter.now) for peer in peers)

    def late(self, load: StoreLoad) -> bool:
        """Whether a hint's load is estimated to arrive after its request, from its likeliest sources and behind the
        hints that are in time."""
        if load.kind not in OPTIONAL or load.arrival == math.inf:
            return False
        elsewhere = Source(SourceKind.PEER, load.sources[0]) if load.sources else BLOB
        sizes: Counter[Source] = Counter()
        for i, (key, _) in enumerate(load.wants):
            chunk = self.usable(load, key)
            if (chunk is None or not chunk.complete) and (absent := self.absent(load, i)):
                tiers = self._tiers(load, chunk) if chunk is not None else []
                sizes[tiers[0] if tiers else elsewhere] += len(absent) * load.shape.piece_bytes
        rates, now = self._meter.rates, self._meter.now
        takes_s = max(
            (rates.estimate_s(source, size, now, before_late=True) for source, size in sizes.items()), default=0.0
        )
        return is_late(takes_s, load.arrival - now)

    def _tiers(self, load: StoreLoad, chunk: Chunk) -> list[Source]:
        """The usable slower tiers that have the chunk. Peers are never served from the blob tier: they can read it
        too."""
        found = []
        if (
            chunk.ssd is CopyState.PRESENT
            and (chunk.key, SourceKind.SSD) not in load.tried
            and self._meter.reads(SourceKind.SSD)
        ):
            found.append(SSD)
        blob = chunk.blob is CopyState.PRESENT and (chunk.key, SourceKind.BLOB) not in load.tried
        if blob and load.leading_only and self._meter.reads(SourceKind.BLOB):
            found.append(BLOB)
        return found

    def tier(self, load: StoreLoad, chunk: Chunk, pieces: int) -> SourceKind | None:
        """The tier that would bring `pieces` ABSENT pieces of the chunk soonest; None: no tier has it."""
        size = pieces * chunk.shape.piece_bytes
        found = self._meter.rates.soonest(self._tiers(load, chunk), size, self._meter.now)
        return found.kind if found is not None else None

    # ---- peers

    def next_peer(self, load: StoreLoad) -> str | None:
        """The soonest of the peers not asked yet; removed from `load.sources`. None when none is left."""
        if not load.sources or not load.leading_only:
            return None
        size = len(load.wants) * load.shape.piece_bytes
        best = self._meter.rates.soonest(
            [Source(SourceKind.PEER, name) for name in load.sources], size, self._meter.now
        )
        assert best is not None
        load.sources.remove(best.peer)
        return best.peer

    def to_ask(self, load: StoreLoad, peer: str) -> list[int]:
        """Indices of the chunks to ask the peer for: those not being brought, unless a tier here is preferred."""
        far = [i for i in range(load.found) if not self.coming(load, i)]
        if not far:
            return []
        size = sum(len(self.absent(load, i)) for i in far) * load.shape.piece_bytes
        return [i for i in far if self._worth(load, i, Source(SourceKind.PEER, peer), size)]

    def blob_first(self, load: StoreLoad, peer: str) -> bool:
        """Whether the blob tier is asked before this peer, because the peer is clearly slower."""
        unknown = [load.wants[i][0] for i in range(load.found) if not self.obtainable(load, i)]
        if not unknown or not self._meter.reads(SourceKind.BLOB) or unknown[0] in load.probed:
            return False
        size = load.shape.chunk_bytes * len(unknown)
        return self._meter.rates.sooner(Source(SourceKind.PEER, peer), BLOB, size, self._meter.now)

    def _worth(self, load: StoreLoad, i: int, peer: Source, size: int) -> bool:
        """Whether `peer` is preferred to this node's tiers that have chunk `i`."""
        rates, now = self._meter.rates, self._meter.now
        chunk = self.usable(load, load.wants[i][0])
        for tier in self._tiers(load, chunk) if chunk is not None else ():
            if tier is SSD and not rates.sooner(SSD, peer, size, now):
                return False
            if tier is BLOB and rates.sooner(peer, BLOB, size, now):
                return False
        return True

    def accepted(
        self, load: StoreLoad, peer: str, asked: list[int], indices: list[int], in_dram: frozenset[int]
    ) -> list[int]:
        """Which of the chunks that the peer offers (`indices` into `asked`) are taken from it. For a chunk that it must
        read from its own SSD a tier here may be preferred."""
        taken = []
        for n in indices:
            source = Source(SourceKind.PEER, peer, on_disk=n not in in_dram)
            if 0 <= n < len(asked) and self._worth(load, asked[n], source, load.shape.chunk_bytes):
                taken.append(n)
        return taken

    def leaves(self, load: StoreLoad, key: bytes, remaining_s: float, size: int) -> bool:
        """Whether a tier here brings the chunk in less than half the time that a slow peer still needs
        (`remaining_s`)."""
        chunk = self.usable(load, key)
        tiers = self._tiers(load, chunk) if chunk is not None else []
        best = self._meter.rates.soonest(tiers, size, self._meter.now)
        return best is not None and 2 * self._meter.rates.estimate_s(best, size, self._meter.now) < remaining_s
