"""Which slot of the arena is whose: slabs, two-phase allocation, pins. Counts and never ranks.

The arena is cut into slabs of equal bytes; a slab holds slots of one size while it holds any, and none when it is empty
again, so models of different piece sizes share the arena. Fullest slabs are filled first, so that slabs empty whole.

Invariants (`validate`): every slot of a used slab is free, reserved or held, exactly one of them; only held slots are
pinned; counters equal what they count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from contracts.errors import IllegalTransition

#: Slots begin at multiples of this: file reads and writes then land on whole pages.
ALIGN = 4096
#: Slabs hold at least this many slots where the arena is large enough.
_SLOTS_PER_SLAB = 16
_SLAB_BYTES = 4 << 20


def slot_bytes(piece_bytes: int) -> int:
    """Bytes of the slot that a piece takes."""
    return -(-piece_bytes // ALIGN) * ALIGN


class _Slab:
    __slots__ = ("base", "free", "size", "total")

    def __init__(self, base: int, size: int, total: int) -> None:
        self.base = base
        self.size = size
        self.total = total
        self.free = [base + i * size for i in range(total - 1, -1, -1)]


class Ledger:
    """The only owner of arena offsets.

    arena_bytes: size of the arena. slab_bytes: size of a slab; larger for pieces that would not fit.
    """

    def __init__(self, arena_bytes: int, slab_bytes: int = _SLAB_BYTES) -> None:
        self.arena_bytes = arena_bytes
        self.slab_bytes = min(slab_bytes, arena_bytes // ALIGN * ALIGN)
        self._empty = list(range((arena_bytes // self.slab_bytes - 1) * self.slab_bytes, -1, -self.slab_bytes)) if self.slab_bytes else []
        self._slabs: dict[int, _Slab] = {}  #: by base
        self._open: dict[int, dict[int, None]] = {}  #: slot size -> bases of slabs with free slots
        self._owner: dict[int, int] = {}  #: offset of a used slot -> base of its slab
        self._reserved: set[int] = set()
        self._pins: dict[int, int] = {}
        self.used_bytes = 0

    def fits(self, size: int) -> bool:
        """Whether slots of `size` bytes can exist at all."""
        return 0 < size <= self.slab_bytes

    def room(self, size: int) -> int:
        """How many slots of `size` can be reserved now."""
        if not self.fits(size):
            return 0
        here = sum(len(self._slabs[base].free) for base in self._open.get(size, ()))
        return here + len(self._empty) * (self.slab_bytes // size)

    def begin(self, size: int, count: int) -> list[int] | None:
        """Reserve `count` slots; None, and nothing changed, when there is no room."""
        if self.room(size) < count:
            return None
        got: list[int] = []
        open_slabs = self._open.setdefault(size, {})
        while len(got) < count:
            if open_slabs:
                base = min(open_slabs, key=lambda b: len(self._slabs[b].free))
            else:
                base = self._empty.pop()
                self._slabs[base] = _Slab(base, size, self.slab_bytes // size)
                open_slabs[base] = None
            slab = self._slabs[base]
            while slab.free and len(got) < count:
                offset = slab.free.pop()
                self._owner[offset] = base
                self._reserved.add(offset)
                got.append(offset)
            if not slab.free:
                del open_slabs[base]
        self.used_bytes += size * count
        return got

    def finish(self, offset: int) -> None:
        """The reserved slot's bytes are there: it is held from now on. Raises IllegalTransition when it was not reserved."""
        if offset not in self._reserved:
            raise IllegalTransition(f"slot {offset} is not reserved")
        self._reserved.discard(offset)

    def abort(self, offset: int) -> None:
        """The reserved slot is not needed after all. Raises IllegalTransition when it was not reserved."""
        self.finish(offset)
        self._free(offset)

    def free(self, offset: int) -> None:
        """Give a held slot back. Raises IllegalTransition when it is pinned, reserved or not in use."""
        if offset in self._reserved or offset in self._pins or offset not in self._owner:
            raise IllegalTransition(f"slot {offset} cannot be freed")
        self._free(offset)

    def pin(self, offset: int) -> None:
        """One more reader of a held slot."""
        if offset in self._reserved or offset not in self._owner:
            raise IllegalTransition(f"slot {offset} is not held")
        self._pins[offset] = self._pins.get(offset, 0) + 1

    def unpin(self, offset: int) -> bool:
        """One reader less; true when it was the last."""
        count = self._pins.get(offset, 0)
        if not count:
            raise IllegalTransition(f"slot {offset} is not pinned")
        if count > 1:
            self._pins[offset] = count - 1
            return False
        del self._pins[offset]
        return True

    def pinned(self, offset: int) -> bool:
        """Whether somebody reads the slot."""
        return offset in self._pins

    def choose(self, size: int, count: int, candidates: Iterable[int]) -> list[int] | None:
        """The first held, unpinned slots of `candidates` (in order) whose freeing makes room for `count` of `size`.

        Slots of another size are taken only when those of this size do not suffice. None when nothing suffices; changes nothing.
        """
        missing = count - self.room(size)
        if missing <= 0:
            return []
        if not self.fits(size):
            return None
        same: list[int] = []
        ordered: list[int] = []
        for offset in candidates:
            ordered.append(offset)
            if self._slabs[self._owner[offset]].size == size:
                same.append(offset)
                if len(same) >= missing:
                    return same
        return self._choose_slabs(size, missing, ordered)

    def _choose_slabs(self, size: int, missing: int, ordered: Sequence[int]) -> list[int] | None:
        """As `choose`, counting slabs that empty whole."""
        used = {base: slab.total - len(slab.free) for base, slab in self._slabs.items()}
        chosen: list[int] = []
        for offset in ordered:
            base = self._owner[offset]
            slab = self._slabs[base]
            chosen.append(offset)
            used[base] -= 1
            if slab.size == size:
                missing -= 1
            elif used[base] == 0:
                missing -= self.slab_bytes // size
            if missing <= 0:
                return chosen
        return None

    def _free(self, offset: int) -> None:
        base = self._owner.pop(offset)
        slab = self._slabs[base]
        slab.free.append(offset)
        self.used_bytes -= slab.size
        open_slabs = self._open[slab.size]
        if len(slab.free) == slab.total:
            open_slabs.pop(base, None)
            del self._slabs[base]
            self._empty.append(base)
        else:
            open_slabs[base] = None

    def held(self, offset: int) -> bool:
        """Whether the slot is in use and no longer only reserved."""
        return offset in self._owner and offset not in self._reserved

    def validate(self) -> None:
        """Raise AssertionError when an invariant does not hold."""
        used = 0
        seen: set[int] = set()
        for base, slab in self._slabs.items():
            free = set(slab.free)
            assert len(free) == len(slab.free) < slab.total
            taken = {base + i * slab.size for i in range(slab.total)} - free
            assert all(self._owner[o] == base for o in taken)
            assert (base in self._open[slab.size]) == bool(free)
            seen |= taken
            used += slab.size * len(taken)
        assert seen == set(self._owner)
        assert used == self.used_bytes
        assert self._reserved <= seen
        assert all(o in seen and o not in self._reserved and n > 0 for o, n in self._pins.items())
        assert not set(self._empty) & set(self._slabs)
        assert (len(self._empty) + len(self._slabs)) * self.slab_bytes <= self.arena_bytes
