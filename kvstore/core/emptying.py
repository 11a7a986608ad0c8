"""Which slabs are best emptied whole, when slots of another kind are wanted: those whose most precious piece goes first.

Of the class that nobody wants any more, whole slabs go before single pieces: one piece of a hint in each of many slabs would keep all
of them from being emptied for the next hint, which may not displace it.

Looking is dear, so a plan looks at the first victims of all kinds once, keeps what it found in order, and looks further only
while there is nothing else to take, and at no more victims than it is told.
"""

from __future__ import annotations

from itertools import islice
from typing import cast

from kvstore.core.eviction import Below, VictimKey, Victims, dropped, protected
from kvstore.core.index import Chunk
from kvstore.core.ledger import Ledger, Slab
from kvstore.core.prefetch import quarter
from kvstore.core.vacating import Vacating

#: So many victims are looked at first, and then so many times more.
LOOK, _FURTHER = 64, 16


def _rather(price: VictimKey, cost: VictimKey) -> bool:
    """Whether slabs whose most precious piece is at `price` are emptied rather than that the victim at `cost` leaves its slab alone."""
    return price < cost or (dropped(price) and dropped(cost))


class Emptying:
    """The slabs that one plan may empty, cheapest first. `below`: only pieces that stand below it; None: any. `most`: victims that
    may be looked at. `looked_at`: how many were."""

    def __init__(self, ledger: Ledger, victims: Victims, plan: Vacating, below: Below | None, most: float) -> None:
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
        """Slabs that make a run when they are emptied, if that costs less than `cost`, a victim; None: anything is better than nothing."""
        while True:
            while self._found and any(self._plan.emptied(slab) for slab in self._found[-1][2]):
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
        """Find what can be emptied among the slabs of the first victims."""
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
        """The place of the slab's most precious piece; None: it cannot be emptied, or is already."""
        if self._plan.emptied(slab):
            return None
        if slab.base not in self._values:
            self._values[slab.base] = self._value(slab)
        return self._values[slab.base]

    def _value(self, slab: Slab) -> VictimKey | None:
        if slab.locked:
            return None
        lowest: dict[bytes, tuple[int, Chunk]] = {}  #: of a chunk's pieces in one slab the lowest layer is the most precious
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
        bottom = layer - layer % quarter(chunk.shape)
        found = {}
        for offset in chunk.offsets[bottom : layer + 1]:
            slab = self._ledger.slab_at(offset)
            if slab is not None:
                found[slab.base] = slab
        return list(found.values())
