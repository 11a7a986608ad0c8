"""From where a load has a chunk: of what can be read, whatever is estimated to bring it soonest. Reads only.

In the arena is at once. Else the candidates are, in the order that ties keep: the own SSD, a peer's arena, a peer's SSD, the
blob tier. A tier that is left alone (health.py) is none, and a source that failed a load is not tried again for it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from kvstore.core.events import SourceKind
from kvstore.core.index import Chunk, Index
from kvstore.core.load import Load
from kvstore.core.meter import Meter
from kvstore.core.prefetch import OPTIONAL, is_late
from kvstore.core.rates import BLOB, SSD, Source
from kvstore.core.state import CopyState, PieceState

#: What a peer may count on: never another peer's promise, or two nodes would wait for each other.
_OWN = (PieceState.QUEUED, PieceState.LOADING, PieceState.SAVING, PieceState.READY)
COMING = (*_OWN, PieceState.EXPECTED)


class Sources:
    """See the module."""

    def __init__(self, index: Index, meter: Meter) -> None:
        self._index = index
        self._meter = meter

    def usable(self, load: Load, key: bytes) -> Chunk | None:
        """The chunk's record, unless it is of another shape or erased."""
        chunk = self._index.chunks.get(key)
        if chunk is None or chunk.doomed:
            return None
        return chunk if chunk.shape is load.shape or chunk.shape == load.shape else None

    def coming(self, load: Load, i: int) -> bool:
        """Whether the wanted pieces are in the arena or on their way."""
        key, layers = load.wants[i]
        chunk = self.usable(load, key)
        states = COMING if load.leading_only else _OWN
        return chunk is not None and (chunk.complete or all(chunk.state(layer) in states for layer in layers))

    def near(self, load: Load, i: int) -> bool:
        """Whether the wanted pieces are in the arena, on their way, or can be read from the own SSD."""
        if self.coming(load, i):
            return True
        chunk = self.usable(load, load.wants[i][0])
        return chunk is not None and SSD in self._tiers(load, chunk)

    def obtainable(self, load: Load, i: int) -> bool:
        """Whether the chunk can be brought, as far as is known."""
        if self.near(load, i):
            return True
        chunk = self.usable(load, load.wants[i][0])
        return chunk is not None and bool(self._tiers(load, chunk))

    def ready(self, load: Load, i: int) -> bool:
        """Whether every wanted piece can be read in the arena."""
        chunk = self.usable(load, load.wants[i][0])
        return chunk is not None and (chunk.complete or all(chunk.state(layer) is PieceState.READY for layer in load.wants[i][1]))

    def expected(self, load: Load, indices: Iterable[int]) -> tuple[SourceKind | None, ...]:
        """From where these chunks' pieces are expected, for whoever estimates how long that takes; None: they are here, or nearly."""
        return tuple(self._expected(load, i) for i in indices)

    def _expected(self, load: Load, i: int) -> SourceKind | None:
        chunk = self.usable(load, load.wants[i][0])
        if chunk is None or self.ready(load, i):
            return None
        if any(chunk.state(layer) is PieceState.EXPECTED for layer in load.wants[i][1]):
            return SourceKind.PEER
        return self.tier(load, chunk, len(load.wants[i][1]))

    def absent(self, load: Load, i: int) -> tuple[int, ...]:
        """The wanted layers that are neither here nor on their way."""
        key, layers = load.wants[i]
        chunk = self.usable(load, key)
        return tuple(layer for layer in layers if chunk is None or chunk.state(layer) is PieceState.ABSENT)

    def own_first(self, load: Load) -> bool:
        """Whether this node's SSD is read at once, before any peer is asked."""
        size = sum(len(layers) for _, layers in load.wants) * load.shape.piece_bytes
        peers = (Source(SourceKind.PEER, name) for name in load.sources)
        return not any(self._meter.rates.sooner(SSD, peer, size, self._meter.now) for peer in peers)

    def late(self, load: Load) -> bool:
        """Whether a hint's load, from the sources that are likeliest and behind what comes in time, is here after its request only."""
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
        takes_s = max((rates.estimate_s(source, size, now, before_late=True) for source, size in sizes.items()), default=0.0)
        return is_late(takes_s, load.arrival - now)

    def _tiers(self, load: Load, chunk: Chunk) -> list[Source]:
        """This node's slower tiers that have the chunk. Peers are never served from the blob tier: they have it too."""
        found = []
        if chunk.ssd is CopyState.PRESENT and (chunk.key, SourceKind.SSD) not in load.tried and self._meter.reads(SourceKind.SSD):
            found.append(SSD)
        blob = chunk.blob is CopyState.PRESENT and (chunk.key, SourceKind.BLOB) not in load.tried
        if blob and load.leading_only and self._meter.reads(SourceKind.BLOB):
            found.append(BLOB)
        return found

    def tier(self, load: Load, chunk: Chunk, pieces: int) -> SourceKind | None:
        """The tier that would bring so many ABSENT pieces of the chunk first; None: no known one."""
        size = pieces * chunk.shape.piece_bytes
        found = self._meter.rates.soonest(self._tiers(load, chunk), size, self._meter.now)
        return found.kind if found is not None else None

    # ---- peers

    def next_peer(self, load: Load) -> str | None:
        """Of the peers that the load may still ask, the one whose arena is soonest; taken off its list. None: there is none left."""
        if not load.sources or not load.leading_only:
            return None
        size = len(load.wants) * load.shape.piece_bytes
        best = self._meter.rates.soonest([Source(SourceKind.PEER, name) for name in load.sources], size, self._meter.now)
        assert best is not None
        load.sources.remove(best.peer)
        return best.peer

    def to_ask(self, load: Load, peer: str) -> list[int]:
        """The chunks worth asking the peer for: what is not here, and what it would bring clearly sooner than the tiers that have it."""
        far = [i for i in range(load.found) if not self.coming(load, i)]
        if not far:
            return []
        size = sum(len(self.absent(load, i)) for i in far) * load.shape.piece_bytes
        return [i for i in far if self._worth(load, i, Source(SourceKind.PEER, peer), size)]

    def blob_first(self, load: Load, peer: str) -> bool:
        """Whether the peer is so slow that the blob tier is asked before it."""
        unknown = [load.wants[i][0] for i in range(load.found) if not self.obtainable(load, i)]
        if not unknown or not self._meter.reads(SourceKind.BLOB) or unknown[0] in load.probed:
            return False
        size = load.shape.chunk_bytes * len(unknown)
        return self._meter.rates.sooner(Source(SourceKind.PEER, peer), BLOB, size, self._meter.now)

    def _worth(self, load: Load, i: int, peer: Source, size: int) -> bool:
        """Whether `peer` is preferred to this node's tiers that have chunk `i`."""
        rates, now = self._meter.rates, self._meter.now
        chunk = self.usable(load, load.wants[i][0])
        for tier in self._tiers(load, chunk) if chunk is not None else ():
            if tier is SSD and not rates.sooner(SSD, peer, size, now):
                return False
            if tier is BLOB and rates.sooner(peer, BLOB, size, now):
                return False
        return True

    def accepted(self, load: Load, peer: str, asked: list[int], indices: list[int], in_dram: frozenset[int]) -> list[int]:
        """Of the chunks that the peer offers (`indices` into `asked`), those to be taken from it: what it must read from its own disk
        may be sooner had from a tier here."""
        taken = []
        for n in indices:
            source = Source(SourceKind.PEER, peer, on_disk=n not in in_dram)
            if 0 <= n < len(asked) and self._worth(load, asked[n], source, load.shape.chunk_bytes):
                taken.append(n)
        return taken

    def leaves(self, load: Load, key: bytes, remaining_s: float, size: int) -> bool:
        """Whether a piece that a slow peer still owes is clearly sooner had from a tier here; the peer needs `remaining_s` more."""
        chunk = self.usable(load, key)
        tiers = self._tiers(load, chunk) if chunk is not None else []
        best = self._meter.rates.soonest(tiers, size, self._meter.now)
        return best is not None and 2 * self._meter.rates.estimate_s(best, size, self._meter.now) < remaining_s
