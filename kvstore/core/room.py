"""How slots are found for what comes: free ones first, else victims, else a slab that wastes more, else none.

Demand and saves may displace any victim. Prefetch and peers' reads may displace only what no live advisory protects: a
spurious hint never costs somebody else's memory. A reservation that cannot succeed changes nothing.

Where a slot is lacking, two things can make one: a victim in a slab of the same kind, or a slab of another kind that is
emptied whole. That is taken whose most precious piece goes first in the order of `eviction`: so a first layer that comes
takes the place of somebody's last layers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import cast

from kvstore.core.emptying import LOOK, Emptying
from kvstore.core.eviction import Below, VictimKey, Victims, kinds_of, protected
from kvstore.core.index import Chunk, Index
from kvstore.core.instructions import Counted, Instruction
from kvstore.core.ledger import Ledger, Slab, SlotKind
from kvstore.core.sessions import Sessions
from kvstore.core.state import PieceState
from kvstore.core.usefulness import Usefulness
from kvstore.core.vacating import Vacating

#: Room is made for so much at once: this share of the arena, and no more than these bytes and pieces: others wait while victims are chosen.
_HEADROOM, _HEADROOM_BYTES, _HEADROOM_PIECES = 32, 16 << 20, 64

#: After a look through more victims than this that found no room, slabs are not looked for again for so long, in seconds for each of the
#: victims. A look takes a tenth of that, and so at most a tenth of the time of a store whose arena is full of what may not leave.
_MANY, _AGAIN_S = 1000, 2e-4

#: What to free next: one slot, or slabs.
_Step = int | list[Slab]


class Room:
    """Reserves slots of the ledger, evicting by rank."""

    def __init__(
        self, index: Index, ledger: Ledger, sessions: Sessions, usefulness: Usefulness, out: list[Instruction], *, layer_priority: bool
    ) -> None:
        self._index = index
        self._ledger = ledger
        self._usefulness = usefulness
        self._out = out
        self._victims = Victims(index, sessions, layer_priority=layer_priority)
        self._futile: dict[tuple[object, ...], int] = {}  #: what found no room -> the ledger's `changes` then
        self._again_s: dict[Below | None, float] = {}  #: when slabs may be looked for again below it

    def reserve(self, pieces: Sequence[tuple[Chunk, int]], now: float, *, below: Below | None) -> list[int] | None:
        """A reserved slot for each (chunk, layer), all of one model, or None. `below`: evict only what stands below it; None: any."""
        of_layer = kinds_of(pieces[0][0].shape)
        kinds = [of_layer[layer] for _, layer in pieces]
        chunks = [chunk for chunk, _ in pieces]
        good, fewest = self._ledger.slab_granules(kinds[0].size)
        if not good:
            return None
        if (slots := self._ledger.begin(kinds, chunks, good)) is not None:
            return slots
        needs = Counter(kinds)
        if not self._evict_ahead(needs, good, now, below):
            if fewest == good or not (self._ledger.has_room(needs, fewest) or self._evict(needs, fewest, now, below)):
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
        """Bring the order of victims up to date. Called now and then, so that what has changed does not pile up."""
        if self._victims.refresh(now):
            self._futile.clear()

    def _evict_ahead(self, needs: Counter[SlotKind], granules: int, now: float, below: Below | None) -> bool:
        """As `_evict`, for more than is needed where that can easily be had: what comes next wants as much, and choosing is dear."""
        size = sum(kind.size * count for kind, count in needs.items())
        ahead = min(min(self._ledger.arena_bytes // _HEADROOM, _HEADROOM_BYTES) // size, _HEADROOM_PIECES // needs.total())
        more = Counter({kind: count * ahead for kind, count in needs.items()})
        if ahead > 1 and self._may_look(now, below) and self._evict(more, granules, now, below, most=LOOK):
            return True
        return self._evict(needs, granules, now, below)

    def _evict(self, needs: Counter[SlotKind], granules: int, now: float, below: Below | None, most: float = math.inf) -> bool:
        """Free what makes `begin` succeed; false, and nothing changed, when nothing does. most: victims whose slabs may be looked at."""
        question = (frozenset(needs.items()), granules, below)
        self.refresh(now)
        if self._futile.get(question) == self._ledger.changes:
            return False
        plan = Vacating(self._ledger, needs, granules)
        emptying = Emptying(self._ledger, self._victims, plan, below, most if self._may_look(now, below) else 0)
        while not plan.enough():
            step = self._next(plan, emptying, below)
            if step is None:
                if emptying.looked_at:
                    self._out.append(Counted("victims_looked_at_in_vain", emptying.looked_at))
                self._victims.settle()
                if emptying.looked_at and most == math.inf:
                    self._futile[question] = self._ledger.changes
                if emptying.looked_at > _MANY:
                    self._again_s[below] = now + _AGAIN_S * emptying.looked_at
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
        """Whether slabs may be looked for: not soon after that was in vain."""
        return now >= self._again_s.get(below, now)

    def _piece_at(self, offset: int) -> tuple[Chunk, int]:
        slab = self._ledger.slab_at(offset)
        assert slab is not None
        chunk = cast(Chunk, slab.holders[(offset - slab.base) // slab.kind.size])
        return chunk, chunk.offsets.index(offset)

    def _next(self, plan: Vacating, emptying: Emptying, below: Below | None) -> _Step | None:
        """What is freed next: the victim or the slabs whose most precious piece goes first."""
        found: tuple[VictimKey, SlotKind, int] | None = None
        for kind in plan.lacking():
            first = self._first(plan, kind)
            if first is not None and not protected(first[0], below) and (found is None or first[0] < found[0]):
                found = (first[0], kind, first[1])
        slabs = emptying.next(found[0] if found is not None else None)
        if slabs is not None:
            return slabs
        if found is None:
            return None
        self._victims.skip(found[1])
        return found[2]

    def _first(self, plan: Vacating, kind: SlotKind) -> tuple[VictimKey, int] | None:
        """The kind's first victim that nobody reads, and its offset."""
        while (first := self._victims.first(kind)) is not None:
            key, chunk, layer = first
            offset = chunk.offsets[layer]
            if offset not in plan.freed and not self._ledger.pinned(offset):
                return key, offset
            self._victims.skip(kind)
        return None
