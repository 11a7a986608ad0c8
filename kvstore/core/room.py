"""How slots are found for incoming pieces: free slots, else evicted ones, else a slab with more waste, else none.

Demand and saves may evict any victim. Prefetch and peers' reads may evict only what no live advisory protects: a false
hint never costs another session its memory. A reservation that cannot succeed changes nothing.

A missing slot can come from a victim in a slab of the same kind, or from evicting a slab of another kind whole. The
option is chosen whose most valuable piece comes first in the order of `eviction`: so an incoming first layer replaces
another session's last layers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import cast

from contracts.memory.victim_order import VictimKey
from kvstore.core.defragmentation import LOOK, Defragmentation
from kvstore.core.eviction import Below, Victims, kinds_of, protected
from kvstore.core.eviction_plan import EvictionPlan
from kvstore.core.index import Chunk, Index
from kvstore.core.instructions import Counted, Instruction
from kvstore.core.ledger import Ledger, Slab, SlotKind
from kvstore.core.sessions import Sessions
from kvstore.core.state import PieceState
from kvstore.core.usefulness import Usefulness

#: Most room made at once: 1 / share of the arena, bytes, and pieces. Everything else waits while victims are chosen.
_HEADROOM, _HEADROOM_BYTES, _HEADROOM_PIECES = 32, 16 << 20, 64

#: After a search in vain, slabs are not searched again for so many seconds per victim looked at, and at most so many.
#: That is several times what the search takes, so that a store full of pieces that may not leave still answers.
_AGAIN_S, _AGAIN_MOST_S = 5e-4, 2.0

#: The limit of a search that may evict anything.
_ANYTHING: Below = (math.inf, math.inf)  # type: ignore[assignment]

#: What to free next: one slot, or slabs.
_Step = int | list[Slab]


class Room:
    """Reserves slots of the ledger, evicting by rank."""

    def __init__(
        self,
        index: Index,
        ledger: Ledger,
        sessions: Sessions,
        usefulness: Usefulness,
        out: list[Instruction],
        *,
        layer_priority: bool,
    ) -> None:
        self._index = index
        self._ledger = ledger
        self._usefulness = usefulness
        self._out = out
        self._victims = Victims(index, sessions, layer_priority=layer_priority)
        #: request that found no room -> the ledger's `changes` at that time
        self._futile: dict[tuple[object, ...], int] = {}
        #: searches in vain: the limit, and when slabs may be searched again for it or for a lower one
        self._vain: list[tuple[Below, float]] = []
        self._looked_at = 0  #: victims, in vain, for the present request

    def reserve(self, pieces: Sequence[tuple[Chunk, int]], now: float, *, below: Below | None) -> list[int] | None:
        """Reserve a slot for each (chunk, layer), all of one model. None when there is no room. below: evict only what
        ranks below it; None: anything evictable."""
        of_layer = kinds_of(pieces[0][0].shape)
        kinds = [of_layer[layer] for _, layer in pieces]
        chunks = [chunk for chunk, _ in pieces]
        good, fewest = self._ledger.slab_granules(kinds[0].size)
        if not good:
            return None
        if (slots := self._ledger.begin(kinds, chunks, good)) is not None:
            return slots
        if below is not None and not self._may_look(now, below):
            return self._ledger.begin(kinds, chunks, fewest)
        needs = Counter(kinds)
        self._looked_at = 0
        if not self._evict_ahead(needs, good, now, below):
            if fewest == good or not (self._ledger.has_room(needs, fewest) or self._evict(needs, fewest, now, below)):
                self._looked_in_vain(now, below)
                return None
            self._out.append(Counted("slabs_with_waste"))
            return self._ledger.begin(kinds, chunks, fewest)
        return self._ledger.begin(kinds, chunks, good)

    def drop(self, chunk: Chunk, layer: int) -> None:
        """Free one READY, unpinned piece."""
        self._usefulness.dropped(chunk, layer)
        self._ledger.free(chunk.offsets[layer])
        self._index.set_piece(chunk, layer, PieceState.ABSENT)

    def refresh(self, now: float) -> None:
        """Update the order of victims. Called on ticks, so that changes do not accumulate."""
        if self._victims.refresh(now):
            self._futile.clear()

    def _evict_ahead(self, needs: Counter[SlotKind], granules: int, now: float, below: Below | None) -> bool:
        """Like `_evict`, for more than is needed where that is cheap: the next reservation needs as much again."""
        size = sum(kind.size * count for kind, count in needs.items())
        ahead = min(
            min(self._ledger.arena_bytes // _HEADROOM, _HEADROOM_BYTES) // size, _HEADROOM_PIECES // needs.total()
        )
        more = Counter({kind: count * ahead for kind, count in needs.items()})
        if ahead > 1 and self._may_look(now, below) and self._evict(more, granules, now, below, most=LOOK):
            return True
        return self._evict(needs, granules, now, below)

    def _evict(
        self, needs: Counter[SlotKind], granules: int, now: float, below: Below | None, most: float = math.inf
    ) -> bool:
        """Evict so that `Ledger.begin` succeeds. False, with nothing changed, when that is impossible. most: limit of
        victims whose slabs are examined."""
        most = most if self._may_look(now, below) else 0
        question = (frozenset(needs.items()), granules, below, most)
        self.refresh(now)
        if self._futile.get(question) == self._ledger.changes:
            return False
        plan = EvictionPlan(self._ledger, needs, granules)
        defragmentation = Defragmentation(self._ledger, self._victims, plan, below, most)
        while not plan.enough():
            step = self._next(plan, defragmentation, below)
            if step is None:
                if defragmentation.looked_at:
                    self._out.append(Counted("victims_looked_at_in_vain", defragmentation.looked_at))
                if most == math.inf:
                    self._looked_at += defragmentation.looked_at
                self._victims.settle()
                self._futile[question] = self._ledger.changes
                return False
            if isinstance(step, int):
                plan.free_slot(step)
            else:
                plan.empty(step)
        evicted: Counter[str] = Counter()
        for offset in plan.freed:
            chunk, layer = self._piece_at(offset)
            evicted[self._victims.reason(chunk, layer)] += chunk.shape.piece_bytes
            self.drop(chunk, layer)
        self._victims.settle()
        self._out.extend(Counted("evicted_bytes", size, ("dram", reason)) for reason, size in evicted.items())
        return True

    def _may_look(self, now: float, below: Below | None) -> bool:
        """Whether slabs may be searched: not soon after a search in vain."""
        return not any(now < again_s and (below or _ANYTHING) <= limit for limit, again_s in self._vain)

    def _looked_in_vain(self, now: float, below: Below | None) -> None:
        if self._looked_at:
            self._vain = [(limit, again_s) for limit, again_s in self._vain if now < again_s]
            self._vain.append((below or _ANYTHING, now + min(_AGAIN_S * self._looked_at, _AGAIN_MOST_S)))
            self._looked_at = 0

    def _piece_at(self, offset: int) -> tuple[Chunk, int]:
        slab = self._ledger.slab_at(offset)
        assert slab is not None
        chunk = cast(Chunk, slab.holders[(offset - slab.base) // slab.kind.size])
        return chunk, chunk.offsets.index(offset)

    def _next(self, plan: EvictionPlan, defragmentation: Defragmentation, below: Below | None) -> _Step | None:
        """What to free next: the victim or the slabs whose most valuable piece ranks lowest."""
        found: tuple[VictimKey, SlotKind, int] | None = None
        for kind in plan.lacking():
            first = self._first(plan, kind)
            if first is not None and not protected(first[0], below) and (found is None or first[0] < found[0]):
                found = (first[0], kind, first[1])
        slabs = defragmentation.next(found[0] if found is not None else None)
        if slabs is not None:
            return slabs
        if found is None:
            return None
        self._victims.skip(found[1])
        return found[2]

    def _first(self, plan: EvictionPlan, kind: SlotKind) -> tuple[VictimKey, int] | None:
        """The kind's first unpinned victim that is not in the plan: its key and offset."""
        while (first := self._victims.first(kind)) is not None:
            key, chunk, layer = first
            offset = chunk.offsets[layer]
            if offset not in plan.freed and not self._ledger.pinned(offset):
                return key, offset
            self._victims.skip(kind)
        return None
