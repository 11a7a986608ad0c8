"""Which pieces leave the arena first (DESIGN section 6; SYMPHONY 3.3, layer-priority eviction).

Order: chunks whose saving was skipped or failed; then class (dropped, unadvised, advised), least urgent priority, highest
layer, least recently used session, latest chunk. Without layer priority, whole chunks go: the layer is compared last.
Ranks only: nothing is freed here.

The order is kept, not made anew: a heap for each model's band of layers has an entry for every chunk with READY pieces
there, at its highest one. Whatever changes a chunk's place (`Index.stirred`, `Sessions.changed`) enters it anew, and an entry
that no longer agrees with its chunk is skipped when it comes up. So a victim costs O(log n).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Generator
from functools import lru_cache

from contracts.ids import SessionKey
from contracts.kv import KvShape
from kvstore.core.index import Chunk, Index
from kvstore.core.ledger import SlotKind, slot_bytes
from kvstore.core.prefetch import band_of, quarter
from kvstore.core.sessions import Rank, Sessions, Standing, strongest
from kvstore.core.state import CopyState, PieceState

#: Compares as eviction does: the smaller goes first.
VictimKey = tuple[int, int, int, float, float, float]
#: Class and urgency (minus the priority).
Below = tuple[int, float]
_Entry = tuple[VictimKey, int, Chunk, int]

#: Looked up once: a search for room asks for the place of many pieces.
_READY, _PRESENT, _WAITING = PieceState.READY, CopyState.PRESENT, CopyState.WAITING

#: First part of the key.
_UNSAVED, _SAVED = 0, 1
#: Heaps are cleared of entries that no longer agree when there are so many times more than chunks.
_SLACK = 8


def unsaved(chunk: Chunk) -> bool:
    """Saved by a worker here, but no slower tier has it or will: dropped first, whole, and recomputed when wanted."""
    ssd, blob = chunk.ssd, chunk.blob
    return chunk.saved_here and not (ssd is _PRESENT or ssd is _WAITING or blob is _PRESENT or blob is _WAITING)


def evictable(chunk: Chunk) -> bool:
    """Whether its READY, unpinned pieces may go: not while a slower tier still waits for bytes from the arena."""
    return chunk.ssd is not _WAITING and not chunk.leaving


def victim_key(chunk: Chunk, layer: int, standing: Standing, layer_priority: bool) -> VictimKey:
    """Where the piece stands among victims."""
    s, whole = standing, unsaved(chunk)
    if whole or not layer_priority:
        return (_UNSAVED if whole else _SAVED, s.rank, s.urgency, s.last_use, -chunk.position, -layer)
    return (_SAVED, s.rank, s.urgency, -layer, s.last_use, -chunk.position)


def under(rank: Rank, priority: float = math.inf) -> Below:
    """What may be displaced for somebody of this class and priority: what is of a class below it, or of it and less urgent."""
    return rank, -priority


def protected(key: VictimKey, below: Below | None) -> bool:
    """Whether the piece is not for those who may only displace what stands below this. Unsaved ones are for everybody."""
    return below is not None and key[0] == _SAVED and key[1:3] >= below


def dropped(key: VictimKey) -> bool:
    """Whether nobody is known to want the piece any more, though a slower tier has it."""
    return key[0] == _SAVED and key[1] == Rank.DROPPED


@lru_cache(maxsize=64)
def kinds_of(shape: KvShape) -> tuple[SlotKind, ...]:
    """By layer, the slots that hold such pieces."""
    return tuple(SlotKind(shape.fingerprint, band_of(shape, layer), slot_bytes(shape.piece_bytes)) for layer in range(shape.layers))


def kind_of(chunk: Chunk, layer: int) -> SlotKind:
    """The slots that hold such a piece."""
    return kinds_of(chunk.shape)[layer]


class Victims:
    """The order over all resident chunks. `refresh` first; then `first` and `skip` walk one kind's pieces, `heads` all
    chunks; `settle` ends the walk, and what was passed and not evicted is back in the order."""

    def __init__(self, index: Index, sessions: Sessions, *, layer_priority: bool) -> None:
        self._index = index
        self._sessions = sessions
        self._layer_priority = layer_priority
        self._heaps: dict[SlotKind, list[_Entry]] = {}
        self._entries = 0
        self._numbers = 0
        self._now = 0.0
        self._standings: dict[bytes, Standing] = {}  #: of chunks, and of sessions, since the last refresh
        self._of_session: dict[SessionKey, Standing] = {}
        self._passed: set[tuple[bytes, int]] = set()
        self._popped: dict[tuple[bytes, SlotKind], Chunk] = {}

    # ---- keeping the order

    def refresh(self, now: float) -> bool:
        """Enter what has changed its place since the last time; false when nothing has."""
        self._now = now
        self._standings.clear()
        self._of_session.clear()
        self._sessions.expire(now)
        changed = bool(self._index.stirred or self._sessions.changed)
        for session in self._sessions.changed:
            self._index.stir(session)
        self._sessions.changed.clear()
        for key in self._index.stirred:
            chunk = self._index.resident.get(key)
            if chunk is not None:
                self._enter(chunk)
        self._index.stirred.clear()
        if self._entries > _SLACK * len(self._index.resident) * 4 + 1024:
            self._heaps.clear()
            self._entries = 0
            for chunk in self._index.resident.values():
                self._enter(chunk)
        return changed

    def key(self, chunk: Chunk, layer: int) -> VictimKey | None:
        """The piece's place now; None: it may not be evicted at all. Pins are the caller's to check."""
        states = chunk.states
        if not states or states[layer] is not _READY or chunk.ssd is _WAITING or chunk.leaving:
            return None
        standing = self._standings.get(chunk.key)
        if standing is None:
            names = self._index.names.get(chunk.key, ())
            standing = self._standings[chunk.key] = strongest([self._standing(s) for s in names])
        return victim_key(chunk, layer, standing, self._layer_priority)

    def _standing(self, session: SessionKey) -> Standing:
        """Of a session, which many chunks share."""
        standing = self._of_session.get(session)
        if standing is None:
            standing = self._of_session[session] = self._sessions.standing(session, self._now)
        return standing

    def reason(self, chunk: Chunk, layer: int) -> str:
        """Why a victim was one: "unsaved", or its class."""
        key = self.key(chunk, layer)
        return "unsaved" if key is None or key[0] == _UNSAVED else Rank(key[1]).name.lower()

    def _enter(self, chunk: Chunk) -> None:
        if chunk.ready and evictable(chunk):
            size = quarter(chunk.shape)
            for start in range(0, chunk.shape.layers, size):
                self._enter_band(chunk, min(start + size, chunk.shape.layers) - 1, start)

    def _enter_band(self, chunk: Chunk, top: int, bottom: int) -> None:
        """An entry at the highest READY layer from `top` down to `bottom` that was not passed."""
        for layer in range(top, bottom - 1, -1):
            key = self.key(chunk, layer)
            if key is not None and (chunk.key, layer) not in self._passed:
                self._numbers += 1
                self._entries += 1
                heapq.heappush(self._heaps.setdefault(kind_of(chunk, layer), []), (key, self._numbers, chunk, layer))
                return

    def _clean(self, kind: SlotKind) -> _Entry | None:
        """The kind's first entry that agrees with its chunk."""
        heap = self._heaps.get(kind)
        while heap:
            key, _, chunk, layer = heap[0]
            known = self._index.resident.get(chunk.key) is chunk and (chunk.key, layer) not in self._passed
            if known and self.key(chunk, layer) == key:
                return heap[0]
            heapq.heappop(heap)
            self._entries -= 1
        self._heaps.pop(kind, None)
        return None

    # ---- walking

    def first(self, kind: SlotKind) -> tuple[VictimKey, Chunk, int] | None:
        """The kind's first victim that was not skipped."""
        entry = self._clean(kind)
        return (entry[0], entry[2], entry[3]) if entry is not None else None

    def skip(self, kind: SlotKind) -> None:
        """Go on to the kind's next victim."""
        entry = self._clean(kind)
        if entry is None:
            return
        _, _, chunk, layer = heapq.heappop(self._heaps[kind])
        self._entries -= 1
        self._passed.add((chunk.key, layer))
        self._popped[chunk.key, kind] = chunk
        self._enter_band(chunk, layer - 1, layer - layer % quarter(chunk.shape))

    def heads(self) -> Generator[tuple[VictimKey, Chunk, int], None, None]:
        """Of every chunk and band its first victim that was not skipped, in order. Close it when it is not used up."""
        heads = [(entry, kind) for kind in list(self._heaps) if (entry := self._clean(kind)) is not None]
        heapq.heapify(heads)
        out: list[tuple[SlotKind, _Entry]] = []
        try:
            while heads:
                entry, kind = heads[0]
                heapq.heappop(self._heaps[kind])
                out.append((kind, entry))
                yield entry[0], entry[2], entry[3]
                following = self._clean_keeping(kind)
                if following is None:
                    heapq.heappop(heads)
                else:
                    heapq.heapreplace(heads, (following, kind))
        finally:
            for kind, entry in out:
                heapq.heappush(self._heaps.setdefault(kind, []), entry)

    def _clean_keeping(self, kind: SlotKind) -> _Entry | None:
        """As `_clean`, but an empty heap stays."""
        entry = self._clean(kind)
        self._heaps.setdefault(kind, [])
        return entry

    def settle(self) -> None:
        """The walk is over."""
        self._passed.clear()
        for (_, kind), chunk in self._popped.items():
            if self._index.resident.get(chunk.key) is chunk:
                bottom = kind.band * quarter(chunk.shape)
                self._enter_band(chunk, min(bottom + quarter(chunk.shape), chunk.shape.layers) - 1, bottom)
        self._popped.clear()
