"""Which pieces leave the arena first: those of the lowest `contracts.memory.victim_order.key`. Nothing is freed here.

The order is maintained incrementally: a queue for each model and band has an entry for every chunk with READY pieces
there, at its highest layer. A change of a chunk's key (`Index.stirred`, `Sessions.changed`) adds a new entry; outdated
entries are skipped. So a victim costs O(log n).

The standing of a chunk that very many sessions name only rises, with those of its sessions that change; one such chunk
a second is ranked anew. Else everybody would wait for as many as one tenant has given names.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator
from functools import lru_cache

from contracts.ids import SessionKey
from contracts.kv import KvShape
from contracts.memory.layer_bands import band_of, layers_of
from contracts.memory.victim_order import Rank, Standing, VictimKey, strongest, victim_key
from kvstore.core.index import MANY_NAMES, Chunk, Index
from kvstore.core.ledger import SlotKind, slot_bytes
from kvstore.core.sessions import Sessions
from kvstore.core.state import CopyState, PieceState

#: A limit for evictions: class and urgency (minus the priority).
Below = tuple[int, float]
_Entry = tuple[VictimKey, int, Chunk, int]

#: Bound once: a search for room computes many keys.
_READY, _PRESENT, _WAITING = PieceState.READY, CopyState.PRESENT, CopyState.WAITING

#: The heaps are rebuilt when they have this many times more entries than there are chunks.
_SLACK = 8
#: Seconds between two recounts of chunks that many sessions name.
_RECOUNT_S = 1.0


def unsaved(chunk: Chunk) -> bool:
    """Whether the chunk was saved by a worker here, but no slower tier has it or will have it: evicted first."""
    ssd, blob = chunk.ssd, chunk.blob
    return chunk.saved_here and not (ssd is _PRESENT or ssd is _WAITING or blob is _PRESENT or blob is _WAITING)


def evictable(chunk: Chunk) -> bool:
    """Whether its READY, unpinned pieces may be evicted: not while they are being written to a slower tier."""
    return chunk.ssd is not _WAITING and not chunk.leaving


def under(rank: Rank, priority: float = math.inf) -> Below:
    """The limit for a load of this class and priority: it may evict lower classes, and its own class if less urgent."""
    return rank, -priority


def protected(key: VictimKey, below: Below | None) -> bool:
    """Whether the limit `below` forbids evicting a piece with this key. Unsaved pieces are never protected."""
    return below is not None and bool(key[0]) and key[1:3] >= below


def dropped(key: VictimKey) -> bool:
    """Whether the piece is of class DROPPED, and a slower tier has it."""
    return bool(key[0]) and key[1] == Rank.DROPPED


@lru_cache(maxsize=64)
def kinds_of(shape: KvShape) -> tuple[SlotKind, ...]:
    """By layer, the kind of slot for a piece of this shape."""
    return tuple(
        SlotKind(shape.fingerprint, band_of(layer, shape.layers), slot_bytes(shape.piece_bytes))
        for layer in range(shape.layers)
    )


def kind_of(chunk: Chunk, layer: int) -> SlotKind:
    """The kind of slot for the chunk's piece."""
    return kinds_of(chunk.shape)[layer]


class _Queue:
    """Entries in order. Those that were read are kept sorted (`front`), as the first ones are read again and again; the
    others, all later, are a heap."""

    __slots__ = ("_heap", "front")

    def __init__(self) -> None:
        self.front: list[_Entry] = []
        self._heap: list[_Entry] = []

    def push(self, entry: _Entry) -> None:
        if self.front and entry < self.front[-1]:
            insort(self.front, entry)
        else:
            heapq.heappush(self._heap, entry)

    def reach(self, position: int) -> bool:
        """Whether there is an entry at `position`, at most one beyond `front`; it is in `front` afterwards."""
        if position == len(self.front) and self._heap:
            self.front.append(heapq.heappop(self._heap))
        return position < len(self.front)


class Victims:
    """The order over all resident chunks. Call `refresh`, then `first` and `skip` to walk one kind's pieces or `heads`
    to walk all chunks, then `settle`, which puts skipped pieces that were not evicted back."""

    def __init__(self, index: Index, sessions: Sessions, *, layer_priority: bool) -> None:
        self._index = index
        self._sessions = sessions
        self._layer_priority = layer_priority
        self._queues: dict[SlotKind, _Queue] = {}
        self._entries = 0
        self._numbers = 0
        self._now = 0.0
        self._standings: dict[bytes, Standing] = {}  #: by chunk, cached since the last refresh
        self._of_session: dict[SessionKey, Standing] = {}
        self._of_many: dict[bytes, Standing] = {}  #: of chunks that many sessions name, the next recount's first
        self._recount_s = -math.inf
        self._passed: set[tuple[bytes, int]] = set()
        self._popped: dict[tuple[bytes, SlotKind], Chunk] = {}

    # ---- keeping the order

    def refresh(self, now: float) -> bool:
        """Add entries for chunks whose key changed since the last time; false when none did."""
        self._now = now
        self._standings.clear()
        self._of_session.clear()
        self._sessions.expire(now)
        changed = bool(self._sessions.changed)
        for session in (*self._sessions.changed, *self._index.joined):
            keys = self._index.stir(session)
            if self._of_many:
                self._raise(keys, self._standing(session))
        self._sessions.changed.clear()
        self._index.joined.clear()
        if self._of_many and now >= self._recount_s:
            self._recount_s = now + _RECOUNT_S
            key = next(iter(self._of_many))
            del self._of_many[key]
            self._index.stir_key(key)
        changed = changed or bool(self._index.stirred)
        for key in self._index.stirred:
            chunk = self._index.resident.get(key)
            if chunk is not None:
                self._enter(chunk)
        self._index.stirred.clear()
        if self._entries > _SLACK * len(self._index.resident) * 4 + 1024:
            self._queues.clear()
            self._entries = 0
            for chunk in self._index.resident.values():
                self._enter(chunk)
        return changed

    def key(self, chunk: Chunk, layer: int) -> VictimKey | None:
        """The piece's current key; None when it may not be evicted. Does not check pins."""
        states = chunk.states
        if not states or states[layer] is not _READY or chunk.ssd is _WAITING or chunk.leaving:
            return None
        standing = self._standings.get(chunk.key)
        if standing is None:
            standing = self._standings[chunk.key] = self._strongest(chunk.key)
        return victim_key(
            standing, unsaved=unsaved(chunk), layer=layer, position=chunk.position, by_layer=self._layer_priority
        )

    def _strongest(self, key: bytes) -> Standing:
        names = self._index.names.get(key, ())
        known = self._of_many.get(key) if len(names) > MANY_NAMES else None
        if known is None:
            known = strongest([self._standing(s) for s in names])
            if len(names) > MANY_NAMES:
                self._of_many[key] = known
        return known

    def _raise(self, keys: Iterable[bytes], standing: Standing) -> None:
        for key in keys:
            known = self._of_many.get(key)
            if known is not None and known < standing:
                self._of_many[key] = standing

    def _standing(self, session: SessionKey) -> Standing:
        """The session's standing, cached because many chunks share it."""
        standing = self._of_session.get(session)
        if standing is None:
            standing = self._of_session[session] = self._sessions.standing(session, self._now)
        return standing

    def reason(self, chunk: Chunk, layer: int) -> str:
        """The reason label for a victim: "unsaved", or its class."""
        key = self.key(chunk, layer)
        return "unsaved" if key is None or not key[0] else Rank(key[1]).name.lower()

    def _enter(self, chunk: Chunk) -> None:
        if chunk.ready and evictable(chunk):
            for band in range(band_of(chunk.shape.layers - 1, chunk.shape.layers) + 1):
                layers = layers_of(band, chunk.shape.layers)
                self._enter_band(chunk, layers[-1], layers[0])

    def _enter_band(self, chunk: Chunk, top: int, bottom: int) -> None:
        """Add an entry at the highest READY layer from `top` down to `bottom` that was not skipped."""
        for layer in range(top, bottom - 1, -1):
            key = self.key(chunk, layer)
            if key is not None and (chunk.key, layer) not in self._passed:
                self._numbers += 1
                self._entries += 1
                kind = kind_of(chunk, layer)
                if kind not in self._queues:
                    self._queues[kind] = _Queue()
                self._queues[kind].push((key, self._numbers, chunk, layer))
                return

    def _current(self, queue: _Queue, position: int) -> _Entry | None:
        """The first entry from `position` on that is up to date; outdated ones before it are removed."""
        while queue.reach(position):
            entry = queue.front[position]
            key, _, chunk, layer = entry
            known = self._index.resident.get(chunk.key) is chunk and (chunk.key, layer) not in self._passed
            if known and self.key(chunk, layer) == key:
                return entry
            del queue.front[position]
            self._entries -= 1
        return None

    # ---- walking

    def first(self, kind: SlotKind) -> tuple[VictimKey, Chunk, int] | None:
        """The kind's first victim that was not skipped."""
        queue = self._queues.get(kind)
        entry = self._current(queue, 0) if queue is not None else None
        return (entry[0], entry[2], entry[3]) if entry is not None else None

    def skip(self, kind: SlotKind) -> None:
        """Go on to the kind's next victim."""
        queue = self._queues.get(kind)
        entry = self._current(queue, 0) if queue is not None else None
        if queue is None or entry is None:
            return
        _, _, chunk, layer = queue.front.pop(0)
        self._entries -= 1
        self._passed.add((chunk.key, layer))
        self._popped[chunk.key, kind] = chunk
        self._enter_band(chunk, layer - 1, layers_of(kind.band, chunk.shape.layers)[0])

    def heads(self, below: Below | None) -> Iterator[tuple[VictimKey, Chunk, int]]:
        """The first unskipped victim of every chunk and band, in order, as far as `below` does not protect them. Found
        one by one: the walk may go on meanwhile, and victims that it skips are left out."""
        #: the next entry of each queue
        heads = [(e, queue) for queue in self._queues.values() if (e := self._current(queue, 0)) is not None]
        heapq.heapify(heads)
        while heads and not protected(heads[0][0][0], below):
            entry, queue = heads[0]
            yield entry[0], entry[2], entry[3]
            following = self._current(queue, bisect_right(queue.front, entry))
            if following is None:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, (following, queue))

    def settle(self) -> None:
        """The walk is over."""
        self._passed.clear()
        for (_, kind), chunk in self._popped.items():
            if self._index.resident.get(chunk.key) is chunk:
                layers = layers_of(kind.band, chunk.shape.layers)
                self._enter_band(chunk, layers[-1], layers[0])
        self._popped.clear()
