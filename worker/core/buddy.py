"""Places small tensors: a buddy pool of 2 KiB to 2 MiB over offsets (HARLI, section 4.5). Touches no memory.

The pool is some blocks of 2 MiB, one after the other. A place is a power of two of 2 KiB, at a multiple of its size.
The lowest suitable place is taken, so that high blocks stay whole. Freed, it is joined with its buddy, the other half
of the place twice its size, and so on.

Invariants (`validate`): places are disjoint and cover the pool; two free buddies are never left apart.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

#: Least and greatest place, in bytes.
LEAST_BYTES, BLOCK_BYTES = 2 << 10, 2 << 20
_ORDERS = (BLOCK_BYTES // LEAST_BYTES).bit_length()
#: Offsets that a heap holds beyond twice the free ones before it is made anew.
_STALE = 16


class BuddyMisuse(Exception):
    """A place was freed that nobody has."""


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """Bytes: asked for by those who have places, in their places, free, and of the greatest free place.
    most_held_bytes: the most that were ever in places."""

    asked_bytes: int
    held_bytes: int
    free_bytes: int
    largest_free_bytes: int
    most_held_bytes: int

    @property
    def wasted_bytes(self) -> int:
        """In places, but not asked for."""
        return self.held_bytes - self.asked_bytes


class BuddyPool:
    """Places in `blocks` blocks. An allocation that does not fit changes nothing."""

    def __init__(self, blocks: int) -> None:
        if blocks < 0:
            raise ValueError(f"blocks = {blocks} must not be negative")
        self.blocks = blocks
        #: By order: free places, and a heap of them in which those that were taken meanwhile still are.
        self._free: list[set[int]] = [set() for _ in range(_ORDERS)]
        self._heaps: list[list[int]] = [[] for _ in range(_ORDERS)]
        #: offset -> (order, bytes that were asked for).
        self._held: dict[int, tuple[int, int]] = {}
        self._asked = self._held_bytes = self._most_held = 0
        for block in range(blocks):
            self._enter(_ORDERS - 1, block * BLOCK_BYTES)

    def alloc(self, bytes_: int) -> int | None:
        """Offset of a place for so many bytes; None: there is none. Raises ValueError beyond a block."""
        if not 0 < bytes_ <= BLOCK_BYTES:
            raise ValueError(f"{bytes_} bytes: a place has 1 to {BLOCK_BYTES}; more goes into whole blocks")
        wanted = _order(bytes_)
        able = [order for order in range(wanted, _ORDERS) if self._free[order]]
        if not able:
            return None
        order = able[0]
        offset = self._lowest(order)
        while order > wanted:
            order -= 1
            self._enter(order, offset + (LEAST_BYTES << order))
        self._held[offset] = (wanted, bytes_)
        self._asked += bytes_
        self._held_bytes += LEAST_BYTES << wanted
        self._most_held = max(self._most_held, self._held_bytes)
        return offset

    def free(self, offset: int) -> None:
        """Give a place back. Raises BuddyMisuse if nobody has it."""
        if offset not in self._held:
            raise BuddyMisuse(f"no place at {offset} is held")
        order, asked = self._held.pop(offset)
        self._asked -= asked
        self._held_bytes -= LEAST_BYTES << order
        while order < _ORDERS - 1 and (buddy := offset ^ (LEAST_BYTES << order)) in self._free[order]:
            self._free[order].remove(buddy)
            offset, order = min(offset, buddy), order + 1
        self._enter(order, offset)

    def place_bytes(self, offset: int) -> int:
        """Size of the place at this offset. Raises BuddyMisuse if nobody has it."""
        if offset not in self._held:
            raise BuddyMisuse(f"no place at {offset} is held")
        return LEAST_BYTES << self._held[offset][0]

    def fragmentation(self) -> Fragmentation:
        """As it is now."""
        largest = max((LEAST_BYTES << order for order in range(_ORDERS) if self._free[order]), default=0)
        free = self.blocks * BLOCK_BYTES - self._held_bytes
        return Fragmentation(self._asked, self._held_bytes, free, largest, self._most_held)

    def _enter(self, order: int, offset: int) -> None:
        free, heap = self._free[order], self._heaps[order]
        free.add(offset)
        heapq.heappush(heap, offset)
        if len(heap) > 2 * len(free) + _STALE:
            heap[:] = sorted(free)

    def _lowest(self, order: int) -> int:
        """Take the lowest free place of this order."""
        heap, free = self._heaps[order], self._free[order]
        while (offset := heapq.heappop(heap)) not in free:
            pass
        free.remove(offset)
        return offset

    def validate(self) -> None:
        """Raise AssertionError when an invariant does not hold."""
        places = [(offset, order) for order, free in enumerate(self._free) for offset in free]
        for offset, order in places:
            assert order == _ORDERS - 1 or offset ^ (LEAST_BYTES << order) not in self._free[order], "buddies apart"
        held = [(offset, order) for offset, (order, _) in self._held.items()]
        at = 0
        for offset, order in sorted(places + held):
            assert offset == at and offset % (LEAST_BYTES << order) == 0, f"a gap or an overlap at {at}"
            at += LEAST_BYTES << order
        assert at == self.blocks * BLOCK_BYTES
        assert self._held_bytes == sum(LEAST_BYTES << order for _, order in held)
        assert self._asked == sum(asked for _, asked in self._held.values()) <= self._held_bytes
        for free, heap in zip(self._free, self._heaps, strict=True):
            assert free <= set(heap) and len(heap) <= 2 * self.blocks * BLOCK_BYTES // LEAST_BYTES + _STALE


def _order(bytes_: int) -> int:
    return max((bytes_ - 1).bit_length() - (LEAST_BYTES - 1).bit_length(), 0)
