"""Which slabs to evict whole when slots of another kind are needed: those whose most valuable piece ranks lowest.

Among dropped pieces whole slabs go before single pieces: otherwise one protected piece of a hint in each of many slabs
would keep all of them from being evicted for the next hint.

Searching is expensive. A plan looks at the first victims of all kinds once, one by one, keeps the slabs it found in
order, and looks at more only while it has no other option, up to a limit. A slab costs at least as much as each victim
that it holds, so a victim is looked at only when nothing that is known costs less.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import cast

from contracts.memory.layer_bands import band_of, layers_of
from contracts.memory.victim_order import VictimKey
from kvstore.core.eviction import Below, Victims, dropped, protected
from kvstore.core.eviction_plan import EvictionPlan
from kvstore.core.index import Chunk
from kvstore.core.ledger import Ledger, Slab

#: A victim: its key, chunk and layer.
_Head = tuple[VictimKey, Chunk, int]

#: Victims examined first, and the factor of each further search.
LOOK, _FURTHER = 64, 16


def _rather(price: VictimKey, cost: VictimKey) -> bool:
    """Whether to evict slabs whose most valuable piece has the key `price` rather than a single victim of key
    `cost`."""
    return price < cost or (dropped(price) and dropped(cost))


def _perhaps(least: VictimKey, cost: VictimKey) -> bool:
    """Whether `_rather` may hold for a price of `least` or more."""
    return least < cost or (dropped(cost) and least[:2] <= cost[:2])


class Defragmentation:
    """The slabs that one plan may evict, cheapest first. below: only pieces that rank below it; None: any. most: limit
    of victims looked at. looked_at: victims looked at so far."""

    def __init__(self, ledger: Ledger, victims: Victims, plan: EvictionPlan, below: Below | None, most: float) -> None:
        self._ledger = ledger
        self._victims = victims
        self._plan = plan
        self._below = below
        self._most = most
        self.looked_at = 0
        self._values: dict[int, VictimKey | None] = {}
        #: Of the last look: its victims, the next of them (None: no more), slabs of those before it, the slabs as they
        #: were when it began, and slabs that can be evicted, a heap.
        self._heads: Iterator[_Head] = iter(())
        self._head: _Head | None = None
        self._seen: set[int] = set()
        self._layout = plan.layout()
        self._found: list[tuple[VictimKey, int, list[Slab]]] = []
        self._limit = self._left = 0  #: of victims that the last look may look at, in all and from now on
        self._all = False  #: it came to the end of them

    def next(self, cost: VictimKey | None) -> list[Slab] | None:
        """Remove and return the cheapest slabs whose eviction makes room for a new slab. None when there are none, or
        when the victim at `cost` is cheaper; cost None: there is no such victim."""
        while True:
            while self._found and any(self._plan.evicts(slab) for slab in self._found[0][2]):
                heapq.heappop(self._found)
            if self._head is not None:
                least, chunk, layer = self._head
                if (not self._found or least <= self._found[0][0]) and (cost is None or _perhaps(least, cost)):
                    self._examine(chunk, layer)
                    self._advance()
                    continue
            if self._found:
                if cost is not None and not _rather(self._found[0][0], cost):
                    return None
                return heapq.heappop(self._found)[2]
            if self._all or self._limit >= self._most or (cost is not None and self._limit):
                return None
            self._look()

    def _look(self) -> None:
        """Begin to look at the first victims, or at more of them than before."""
        self._limit = self._limit * _FURTHER or LOOK
        self._heads = self._victims.heads(self._below)
        self._left = self._limit
        self._seen.clear()
        self._layout = self._plan.layout()
        self._advance()

    def _advance(self) -> None:
        """Go on to the look's next victim."""
        self._head = next(self._heads, None) if self._left else None
        if self._head is not None:
            self._left -= 1
            self.looked_at += 1
        elif self._left:
            self._all = True

    def _examine(self, chunk: Chunk, layer: int) -> None:
        """Find slabs that can be evicted among those of a victim."""
        for slab in self._slabs_of(chunk, layer):
            if slab.base in self._seen or self._worth(slab) is None:
                continue
            self._seen.add(slab.base)
            window = self._layout.window(slab, self._worth)
            if window is not None:
                price = max(cast(VictimKey, self._worth(s)) for s in window)
                heapq.heappush(self._found, (price, slab.base, window))

    def _worth(self, slab: Slab) -> VictimKey | None:
        """The key of the slab's most valuable piece; None: it cannot be evicted, or was in the plan at the last
        look."""
        if slab.base in self._layout.evicted:
            return None
        if slab.base not in self._values:
            self._values[slab.base] = self._value(slab)
        return self._values[slab.base]

    def _value(self, slab: Slab) -> VictimKey | None:
        if slab.locked:
            return None
        #: of a chunk's pieces in one slab the lowest layer is the most valuable
        lowest: dict[bytes, tuple[int, Chunk]] = {}
        for offset, holder in slab.slots():
            chunk = cast(Chunk, holder)
            layer = chunk.offsets.index(offset)
            known = lowest.get(chunk.key)
            if known is None or layer < known[0]:
                lowest[chunk.key] = layer, chunk
        most: VictimKey | None = None
        for layer, chunk in lowest.values():
            key = self._victims.key(chunk, layer)
            if key is None or protected(key, self._below):
                return None
            if most is None or key > most:
                most = key
        return most

    def _slabs_of(self, chunk: Chunk, layer: int) -> list[Slab]:
        """The slabs that hold the chunk's pieces of the layer's band."""
        bottom = layers_of(band_of(layer, chunk.shape.layers), chunk.shape.layers).start
        found = {}
        for offset in chunk.offsets[bottom : layer + 1]:
            slab = self._ledger.slab_at(offset)
            if slab is not None:
                found[slab.base] = slab
        return list(found.values())
