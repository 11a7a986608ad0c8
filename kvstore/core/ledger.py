"""Which slot of the arena belongs to which piece: slabs, two-phase allocation, pins. Never ranks.

The arena is cut into granules. A slab is the smallest number of neighbouring granules that slots of one size fill with
at most 5 % waste, and holds slots of one model and one band of its layers while it holds any; its granules are free
again when it is empty. Fullest slabs are filled first, so that slabs empty whole. Small arenas have small granules; a
slab that wastes more is the last choice (`Ledger.begin`).

Invariants (`validate`): every granule is free or in one slab; every slot of a slab is free, reserved or held, exactly
one of them, and lies within the slab; only held slots are pinned; counters equal what they count.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from contracts.errors import IllegalTransition
from contracts.memory.slab_size import slab_granules
from kvstore.core.granules import Granules

#: Slots begin at multiples of this: file reads and writes then land on whole pages.
ALIGN = 4096
GRANULE_BYTES = 2 << 20
#: Arenas that would have fewer granules get smaller ones.
_GRANULES = 256


class SlotKind(NamedTuple):
    """What a slab holds: one model's pieces of one band of layers, in slots of `size` bytes."""

    model: bytes
    band: int
    size: int


def slot_bytes(piece_bytes: int) -> int:
    """Bytes of the slot that a piece takes."""
    return -(-piece_bytes // ALIGN) * ALIGN


def suitable_granule(arena_bytes: int) -> int:
    """Bytes of a granule: 2 MiB, or less so that a small arena has many."""
    granule = GRANULE_BYTES
    while granule > ALIGN and arena_bytes // granule < _GRANULES:
        granule //= 2
    return granule


class Slab:
    """`used` slots are reserved or held; `locked` ones are reserved or pinned. `holders`: who was named for each used
    slot."""

    __slots__ = ("base", "first", "free", "granules", "holders", "kind", "locked", "total")

    def __init__(self, kind: SlotKind, first: int, granules: int, granule_bytes: int) -> None:
        self.kind = kind
        self.first = first
        self.granules = granules
        self.base = first * granule_bytes
        self.total = granules * granule_bytes // kind.size
        self.free = list(range(self.total - 1, -1, -1))
        self.holders: list[object | None] = [None] * self.total
        self.locked = 0

    @property
    def used(self) -> int:
        return self.total - len(self.free)

    def slots(self) -> Iterator[tuple[int, object]]:
        """The (offset, holder) of used slots."""
        for i, holder in enumerate(self.holders):
            if holder is not None:
                yield self.base + i * self.kind.size, holder


class _Shelf:
    """The slabs of one kind. heap: (free slots, base); outdated entries are skipped."""

    __slots__ = ("free", "heap", "slabs")

    def __init__(self) -> None:
        self.free = 0
        self.slabs: dict[int, Slab] = {}
        self.heap: list[tuple[int, int]] = []

    def push(self, slab: Slab) -> None:
        heapq.heappush(self.heap, (len(slab.free), slab.base))
        if len(self.heap) > 2 * len(self.slabs) + 64:
            self.heap = [(len(s.free), base) for base, s in self.slabs.items() if s.free]
            heapq.heapify(self.heap)

    def fullest(self) -> Slab | None:
        """The slab with the fewest free slots that has any."""
        while self.heap:
            free, base = self.heap[0]
            slab = self.slabs.get(base)
            if slab is not None and len(slab.free) == free > 0:
                return slab
            heapq.heappop(self.heap)
        return None


class Ledger:
    """The only owner of arena offsets.

    granule_bytes: a multiple of ALIGN; None: `suitable_granule`. changes: counts everything that may have made room.
    top_bytes: the highest end of any slab so far.
    """

    def __init__(self, arena_bytes: int, granule_bytes: int | None = None) -> None:
        self.arena_bytes = arena_bytes
        self.granule_bytes = granule_bytes or suitable_granule(arena_bytes)
        self.granules = Granules(arena_bytes // self.granule_bytes)
        self._at: list[Slab | None] = [None] * self.granules.count  #: by granule
        self._shelves: dict[SlotKind, _Shelf] = {}
        self._reserved: set[int] = set()
        self._pins: dict[int, int] = {}
        self._sizes: dict[int, tuple[int, int]] = {}
        self.used_bytes = 0
        self.changes = 0
        self.top_bytes = 0

    # ---- questions

    def slab_granules(self, size: int) -> tuple[int, int]:
        """Granules of a slab with slots of `size`: (with at most 5 % waste, the fewest that hold one slot). (0, 0) when
        no such slab fits the arena."""
        if size not in self._sizes:
            slab = slab_granules(size, self.granule_bytes, self.granules.count)
            self._sizes[size] = (slab, -(-size // self.granule_bytes)) if slab else (0, 0)
        return self._sizes[size]

    def fits(self, size: int) -> bool:
        """Whether a slot of `size` bytes fits the arena."""
        return self.slab_granules(size)[0] > 0

    def lacking(self, needs: Mapping[SlotKind, int]) -> dict[SlotKind, int]:
        """Slots by kind that existing slabs do not have free; kinds with enough are left out."""
        lack = {kind: count - self.free_slots(kind) for kind, count in needs.items()}
        return {kind: count for kind, count in lack.items() if count > 0}

    def free_slots(self, kind: SlotKind) -> int:
        """Free slots in the slabs of the kind."""
        shelf = self._shelves.get(kind)
        return shelf.free if shelf is not None else 0

    def has_room(self, needs: Mapping[SlotKind, int], granules: int) -> bool:
        """Whether `begin` would succeed with new slabs of `granules` granules."""
        return slabs_needed(self.lacking(needs), granules * self.granule_bytes) <= self.granules.available(granules)

    def slab_at(self, offset: int) -> Slab | None:
        """The slab that contains the offset."""
        return (
            self._at[offset // self.granule_bytes] if 0 <= offset < self.granules.count * self.granule_bytes else None
        )

    def slab_of_granule(self, granule: int) -> Slab | None:
        """The slab of the granule; None when it is free or does not exist."""
        return self._at[granule] if 0 <= granule < self.granules.count else None

    @property
    def reserved_slots(self) -> int:
        """Number of reserved slots: their bytes have not come."""
        return len(self._reserved)

    @property
    def pinned_slots(self) -> int:
        """Number of pinned slots."""
        return len(self._pins)

    def pinned(self, offset: int) -> bool:
        """Whether the slot is pinned."""
        return offset in self._pins

    def held(self, offset: int) -> bool:
        """Whether the slot is in use and not merely reserved."""
        return self._used(offset) is not None and offset not in self._reserved

    @property
    def idle(self) -> bool:
        """Whether no slot is reserved or pinned."""
        return not self._reserved and not self._pins

    # ---- the two phases

    def begin(self, kinds: Sequence[SlotKind], holders: Sequence[object], granules: int) -> list[int] | None:
        """Reserve one slot of each kind for its holder. granules: size of new slabs. None, with nothing changed, when
        there is no room."""
        if not self.has_room(Counter(kinds), granules):
            return None
        offsets: list[int] = []
        slab: Slab | None = None
        for kind, holder in zip(kinds, holders, strict=True):
            if slab is None or slab.kind != kind or not slab.free:
                self._shelve(slab)
                shelf = self._shelves.setdefault(kind, _Shelf())
                slab = shelf.fullest() or self._new_slab(kind, shelf, granules)
            index = slab.free.pop()
            slab.holders[index] = holder
            slab.locked += 1
            shelf.free -= 1
            self.used_bytes += kind.size
            offsets.append(slab.base + index * kind.size)
        self._shelve(slab)
        self._reserved.update(offsets)
        return offsets

    def _shelve(self, slab: Slab | None) -> None:
        """Slots of the slab were taken: put it back into the heap if it has free ones."""
        if slab is not None and slab.free:
            self._shelves[slab.kind].push(slab)

    def _new_slab(self, kind: SlotKind, shelf: _Shelf, granules: int) -> Slab:
        first = self.granules.take(granules)
        if first is None:
            raise IllegalTransition("there is no run of granules for a slab")
        slab = Slab(kind, first, granules, self.granule_bytes)
        self._at[first : first + granules] = [slab] * granules
        shelf.slabs[slab.base] = slab
        shelf.free += slab.total
        self.top_bytes = max(self.top_bytes, (first + granules) * self.granule_bytes)
        return slab

    def finish(self, offset: int) -> None:
        """The reserved slot's bytes have come: it is held. Raises IllegalTransition when it was not reserved."""
        if offset not in self._reserved:
            raise IllegalTransition(f"slot {offset} is not reserved")
        self._reserved.discard(offset)
        self._unlock(offset)

    def abort(self, offset: int) -> None:
        """Give a reserved slot back. Raises IllegalTransition when it was not reserved."""
        self.finish(offset)
        self._free(offset)

    def free(self, offset: int) -> None:
        """Give a held slot back. Raises IllegalTransition when it is pinned, reserved or not in use."""
        if offset in self._reserved or offset in self._pins or self._used(offset) is None:
            raise IllegalTransition(f"slot {offset} cannot be freed")
        self._free(offset)

    def pin(self, offset: int) -> None:
        """Pin a held slot once more. Raises IllegalTransition when it is not held."""
        slab = self._used(offset)
        if slab is None or offset in self._reserved:
            raise IllegalTransition(f"slot {offset} is not held")
        if offset not in self._pins:
            slab.locked += 1
        self._pins[offset] = self._pins.get(offset, 0) + 1

    def unpin(self, offset: int) -> bool:
        """Remove one pin; true when it was the last. Raises IllegalTransition when there is none."""
        count = self._pins.get(offset, 0)
        if not count:
            raise IllegalTransition(f"slot {offset} is not pinned")
        if count > 1:
            self._pins[offset] = count - 1
            return False
        del self._pins[offset]
        self._unlock(offset)
        return True

    def _unlock(self, offset: int) -> None:
        slab = self.slab_at(offset)
        assert slab is not None
        slab.locked -= 1
        self.changes += 1

    def _used(self, offset: int) -> Slab | None:
        """The slab, if the offset is that of a used slot."""
        slab = self.slab_at(offset)
        if slab is None:
            return None
        index, rest = divmod(offset - slab.base, slab.kind.size)
        return slab if not rest and index < slab.total and slab.holders[index] is not None else None

    def _free(self, offset: int) -> None:
        slab = self._used(offset)
        assert slab is not None
        index = (offset - slab.base) // slab.kind.size
        slab.holders[index] = None
        slab.free.append(index)
        shelf = self._shelves[slab.kind]
        shelf.free += 1
        self.used_bytes -= slab.kind.size
        self.changes += 1
        if slab.used:
            shelf.push(slab)
            return
        del shelf.slabs[slab.base]
        shelf.free -= slab.total
        self._at[slab.first : slab.first + slab.granules] = [None] * slab.granules
        self.granules.give(slab.first, slab.granules)
        if not shelf.slabs:
            del self._shelves[slab.kind]

    def validate(self) -> None:
        """Raise AssertionError when an invariant does not hold."""
        self.granules.validate()
        used = granules = 0
        locked: Counter[int] = Counter()
        for offset in (*self._reserved, *self._pins):
            slab = self._used(offset)
            assert slab is not None
            locked[slab.base] += 1
        assert not self._reserved & self._pins.keys() and all(n > 0 for n in self._pins.values())
        for kind, shelf in self._shelves.items():
            assert shelf.slabs and shelf.free == sum(len(s.free) for s in shelf.slabs.values())
            for base, slab in shelf.slabs.items():
                assert slab.kind == kind and base == slab.base == slab.first * self.granule_bytes
                assert self._at[slab.first : slab.first + slab.granules] == [slab] * slab.granules
                assert slab.total * kind.size <= slab.granules * self.granule_bytes and slab.used > 0
                assert len(set(slab.free)) == len(slab.free) == slab.holders.count(None)
                assert not any(slab.holders[i] for i in slab.free)
                assert not slab.free or (len(slab.free), base) in shelf.heap
                assert slab.locked == locked[base]
                assert base + slab.granules * self.granule_bytes <= self.top_bytes
                used += kind.size * slab.used
                granules += slab.granules
        assert used == self.used_bytes
        assert granules + self.granules.free == self.granules.count == len(self._at)
        assert sum(slab is not None for slab in self._at) == granules


def slabs_needed(lacking: Mapping[SlotKind, int], slab_bytes: int) -> int:
    """Number of new slabs of `slab_bytes` that provide the lacking slots."""
    return sum(-(-count // (slab_bytes // kind.size)) for kind, count in lacking.items())
