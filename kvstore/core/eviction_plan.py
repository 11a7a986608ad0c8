"""Whether freeing certain slots would make enough room: an eviction plan that counts and changes nothing.

Slots of a needed kind count one by one. Other slabs count when evicted whole, together with the free granules beside
them. Prior art: vLLM's offloading manager refuses an eviction that cannot make enough room before it touches anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvstore.core.granules import Granules
from kvstore.core.ledger import Ledger, Slab, SlotKind, slabs_needed


class Layout(NamedTuple):
    """The slabs and free granules at one moment of a plan; what it evicts later does not change them. runs: the free
    granules. evicted: bases of the slabs that the plan had evicted."""

    ledger: Ledger
    granules: int
    runs: Granules
    evicted: frozenset[int]

    def window(self, slab: Slab, worth: Callable[[Slab], object]) -> list[Slab] | None:
        """Adjacent slabs to evict, `slab` among them, so that one more new slab fits; neighbours of least `worth`
        first. None when that is impossible. worth: None for a slab that cannot be evicted."""
        slabs = [slab]
        first, length, most = slab.first, slab.granules, self.granules
        while True:
            before, after = self.runs.beside(first, length)
            gained = (before + length + after) // most - before // most - after // most
            if gained > 0:
                return slabs
            left = self.ledger.slab_of_granule(first - before - 1)
            right = self.ledger.slab_of_granule(first + length + after)
            sides = [(worth(s), s is right, s) for s in (left, right) if s is not None and worth(s) is not None]
            if not sides:
                return None
            _, rightward, chosen = min(sides, key=lambda side: side[:2])
            slabs.append(chosen)
            if rightward:
                length = chosen.first + chosen.granules - first
            else:
                length, first = first + length - chosen.first, chosen.first


class EvictionPlan:
    """A plan for `needs`, with new slabs of `granules` granules. freed: the offsets to free so far, in order."""

    def __init__(self, ledger: Ledger, needs: Mapping[SlotKind, int], granules: int) -> None:
        self._ledger = ledger
        self._needs = needs
        self._granules = granules
        #: Free granules; `_shared` with the ledger or a layout, and then copied before the next change.
        self._runs, self._shared = ledger.granules, True
        self._free = {kind: ledger.free_slots(kind) for kind in needs}
        self._evicted: set[int] = set()
        self._freed_in: Counter[int] = Counter()
        self.freed: dict[int, None] = {}

    def lacking(self) -> dict[SlotKind, int]:
        """Slots of each kind still missing, without new slabs."""
        return {kind: count - self._free[kind] for kind, count in self._needs.items() if count > self._free[kind]}

    def enough(self) -> bool:
        """Whether `Ledger.begin` would succeed once everything in `freed` is free."""
        slab_bytes = self._granules * self._ledger.granule_bytes
        return slabs_needed(self.lacking(), slab_bytes) <= self._runs.available(self._granules)

    def free_slot(self, offset: int) -> None:
        """Add one slot of a needed kind to the plan."""
        slab = self._ledger.slab_at(offset)
        assert slab is not None
        self._free[slab.kind] += 1
        self.freed[offset] = None
        self._freed_in[slab.base] += 1
        if self._freed_in[slab.base] == slab.used:
            self._empty(slab)

    def empty(self, slabs: list[Slab]) -> None:
        """Add whole slabs to the plan."""
        for slab in slabs:
            if slab.kind in self._free:
                self._free[slab.kind] += slab.used - self._freed_in[slab.base]
            self.freed.update(dict.fromkeys(offset for offset, _ in slab.slots()))
            self._empty(slab)

    def _empty(self, slab: Slab) -> None:
        if slab.kind in self._free:
            self._free[slab.kind] -= slab.total
        self._evicted.add(slab.base)
        if self._shared:
            self._runs, self._shared = self._runs.copy(), False
        self._runs.give(slab.first, slab.granules)

    def evicts(self, slab: Slab) -> bool:
        """Whether the plan evicts the whole slab."""
        return slab.base in self._evicted

    def layout(self) -> Layout:
        """The slabs and free granules as the plan leaves them so far."""
        self._shared = True
        return Layout(self._ledger, self._granules, self._runs, frozenset(self._evicted))
