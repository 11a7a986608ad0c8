"""Which slabs to evict whole when slots of another kind are needed: those whose most valuable piece ranks lowest.

Among dropped pieces whole slabs go before single pieces: otherwise one protected piece of a hint in each of many slabs
would keep all of them from being evicted for the next hint.

Searching is expensive. A plan examines the first victims of all kinds once, keeps the slabs it found in order, and
examines more only while it has no other option, up to a limit.
"""

from __future__ import annotations

from itertools import islice
from typing import cast

from contracts.memory.layer_bands import band_of, layers_of
from contracts.memory.victim_order import VictimKey
from kvstore.core.eviction import Below, Victims, dropped, protected
from kvstore.core.eviction_plan import EvictionPlan
from kvstore.core.index import Chunk
from kvstore.core.ledger import Ledger, Slab

#: Victims examined first, and the factor of each further search.
LOOK, _FURTHER = 64, 16


def _rather(price: VictimKey, cost: VictimKey) -> bool:
    """Whether to evict slabs whose most valuable piece has the key `price` rather than a single victim of key
    `cost`."""
    return price < cost or (dropped(price) and dropped(cost))


class Defragmentation:
    """The slabs that one plan may evict, cheapest first. below: only pieces that rank below it; None: any. most: limit
    of victims examined. looked_at: victims examined so far."""

    def __init__(self, ledger: Ledger, victims: Victims, plan: EvictionPlan, below: Below | None, most: float) -> None:
        self._ledger = ledger
        self._victims = victims
        self._plan = plan
        self._below = below
        self._most = most
        self.looked_at = 0
        self._values: dict[int, VictimKey | None] = {}
        self._found: list[tuple[VictimKey, int, list[Slab]]] = []  #: the cheapest last
        self._looked = 0
        self._all = False

    def next(self, cost: VictimKey | None) -> list[Slab] | None:
        """Remove and return the cheapest slabs whose eviction makes room for a new slab. None when there are none, or
        when the victim at `cost` is cheaper; cost None: there is no such victim."""
        while True:
            while self._found and any(self._plan.evicts(slab) for slab in self._found[-1][2]):
                self._found.pop()
            if self._found:
                price, _, slabs = self._found[-1]
                if cost is not None and not _rather(price, cost):
                    return None
                self._found.pop()
                return slabs
            if self._all or self._looked >= self._most or (cost is not None and self._looked):
                return None
            self._look()

    def _look(self) -> None:
        """Find slabs that can be evicted among those of the first victims."""
        self._looked = self._looked * _FURTHER or LOOK
        heads = self._victims.heads()
        seen: set[int] = set()
        count = 0
        for key, chunk, layer in islice(heads, self._looked):
            if protected(key, self._below):
                break
            count += 1
            for slab in self._slabs_of(chunk, layer):
                if slab.base in seen or self._worth(slab) is None:
                    continue
                seen.add(slab.base)
                window = self._plan.window(slab, self._worth)
                if window is not None:
                    self._found.append((max(cast(VictimKey, self._worth(s)) for s in window), slab.base, window))
        heads.close()
        self.looked_at += count
        self._all = count < self._looked
        self._found.sort(key=lambda f: f[:2], reverse=True)

    def _worth(self, slab: Slab) -> VictimKey | None:
        """The key of the slab's most valuable piece; None: it cannot be evicted, or is in the plan already."""
        if self._plan.evicts(slab):
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
