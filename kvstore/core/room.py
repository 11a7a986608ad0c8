"""How slots are found for what comes: free ones first, else victims, else none.

Demand and saves may displace any victim. Prefetch and peers' reads may displace only what no live advisory protects: a
spurious hint never costs somebody else's memory. A reservation that cannot succeed changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from kvstore.core.eviction import unsaved, victims
from kvstore.core.index import Chunk, Index
from kvstore.core.instructions import Counted, Instruction
from kvstore.core.ledger import Ledger, slot_bytes
from kvstore.core.sessions import Rank, Sessions, Standing, strongest
from kvstore.core.state import PieceState
from kvstore.core.usefulness import Usefulness


class Room:
    """Reserves slots of the ledger, evicting by rank.

    headroom_bytes: evicting goes on up to this much beyond what is needed, so that the ranking is not made for every piece.
    """

    def __init__(
        self,
        index: Index,
        ledger: Ledger,
        sessions: Sessions,
        usefulness: Usefulness,
        out: list[Instruction],
        *,
        layer_priority: bool,
        headroom_bytes: int = 0,
    ) -> None:
        self._index = index
        self._ledger = ledger
        self._sessions = sessions
        self._usefulness = usefulness
        self._out = out
        self._layer_priority = layer_priority
        self._headroom_bytes = headroom_bytes

    def reserve(self, piece_bytes: int, count: int, now: float, *, below: Rank | None) -> list[int] | None:
        """`count` reserved slots for pieces of `piece_bytes`, or None. `below`: evict only classes below it; None: any."""
        size = slot_bytes(piece_bytes)
        if self._ledger.room(size) < count and not self._evict(size, count, now, below):
            return None
        return self._ledger.begin(size, count)

    def drop(self, chunk: Chunk, layer: int) -> None:
        """Free one READY, unpinned piece."""
        self._usefulness.dropped(chunk, layer)
        self._ledger.free(chunk.offsets[layer])
        self._index.set_piece(chunk, layer, PieceState.ABSENT)

    def _evict(self, size: int, count: int, now: float, below: Rank | None) -> bool:
        standings: dict[object, Standing] = {}

        def standing(chunk: Chunk) -> Standing:
            found = []
            for session in self._index.names.get(chunk.key, ()):
                if session not in standings:
                    standings[session] = self._sessions.standing(session, now)
                found.append(standings[session])
            return strongest(found)

        ranked = victims(self._index.resident.values(), standing, below=below, layer_priority=self._layer_priority)
        owner: dict[int, tuple[Chunk, int]] = {}

        def candidates() -> Iterator[int]:
            for chunk, layer in ranked:
                offset = chunk.offsets[layer]
                if not self._ledger.pinned(offset):
                    owner[offset] = (chunk, layer)
                    yield offset

        generous = max(count, self._headroom_bytes // size)
        chosen = self._ledger.choose(size, generous, candidates()) or self._ledger.choose(size, count, list(owner))
        if not chosen:
            return False
        evicted: Counter[str] = Counter()
        for offset in chosen:
            chunk, layer = owner[offset]
            reason = "unsaved" if unsaved(chunk) else standing(chunk).rank.name.lower()
            evicted[reason] += chunk.shape.piece_bytes
            self.drop(chunk, layer)
        self._out.extend(Counted("evicted_bytes", size, ("dram", reason)) for reason, size in evicted.items())
        return True
