"""Which page holds which piece: slabs, bands of layers, and who may borrow from whom.

A page holds one piece. Pages come in slabs (DESIGN section 3); a slab is filled by one band of neighbouring layers, so
that purging last layers frees whole slabs. A page comes from the fullest slab of its own band, else from an unused slab
(which must then be mapped), else, as a last resort, from another band's.

Invariants: a page is free in exactly one slab or taken; a slab that is not mapped has no taken page.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Pages = npt.NDArray[np.int64]


@dataclass(slots=True)
class _Slab:
    number: int
    mapped: bool = False
    band: int = -1
    free: list[int] = field(default_factory=list)


class PagePool:
    """The ledger of `slab_count` slabs of `pages_per_slab` pages for a model of `layers` layers.

    It counts and names; `to_map` lists slabs that must be backed by memory before the pages handed out are touched, and
    whoever owns the memory empties that list.
    """

    def __init__(self, slab_count: int, pages_per_slab: int, layers: int, bands: int = 4) -> None:
        self.pages_per_slab, self.layers = pages_per_slab, layers
        self.bands = max(1, min(bands, layers))
        self.total = slab_count * pages_per_slab
        self.free = self.total
        self.to_map: list[int] = []
        self._slabs = [_Slab(i, free=list(range((i + 1) * pages_per_slab - 1, i * pages_per_slab - 1, -1))) for i in range(slab_count)]
        self._unused = list(range(slab_count - 1, -1, -1))
        self._open: list[set[int]] = [set() for _ in range(self.bands)]  # used slabs of a band with a free page

    def band_of(self, layer: int) -> int:
        """The band a layer belongs to; later layers in higher bands."""
        return layer * self.bands // self.layers

    def take(self, layer: int) -> int:
        """A page for a piece of this layer. Raises MemoryError when none is free."""
        band = self.band_of(layer)
        slab = self._fullest(band)
        if slab is None and self._unused:
            slab = self._slabs[self._unused.pop()]
            slab.band = band
            if not slab.mapped:
                slab.mapped = True
                self.to_map.append(slab.number)
            self._open[band].add(slab.number)
        if slab is None:
            slab = next((s for b in range(self.bands - 1, -1, -1) if (s := self._fullest(b)) is not None), None)
        if slab is None:
            raise MemoryError("no free page")
        page = slab.free.pop()
        if not slab.free:
            self._open[slab.band].discard(slab.number)
        self.free -= 1
        return page

    def give(self, pages: list[int]) -> None:
        """Return taken pages. Raises ValueError on a page that is free already."""
        for page in pages:
            slab = self._slabs[page // self.pages_per_slab]
            if slab.band < 0 or page in slab.free:
                raise ValueError(f"page {page} is not taken")
            slab.free.append(page)
            self.free += 1
            if len(slab.free) == self.pages_per_slab:
                self._open[slab.band].discard(slab.number)
                slab.band = -1
                self._unused.append(slab.number)
            else:
                self._open[slab.band].add(slab.number)

    def _fullest(self, band: int) -> _Slab | None:
        numbers = self._open[band]
        return self._slabs[min(numbers, key=lambda n: (len(self._slabs[n].free), n))] if numbers else None

    def validate(self) -> None:
        """Raise AssertionError when the ledger contradicts itself."""
        assert self.free == sum(len(s.free) for s in self._slabs)
        for s in self._slabs:
            assert len(set(s.free)) == len(s.free)
            assert all(p // self.pages_per_slab == s.number for p in s.free)
            used = len(s.free) < self.pages_per_slab
            assert used == (s.band >= 0) and used == (s.number not in self._unused)
            assert not used or s.mapped
            for band, numbers in enumerate(self._open):
                assert (s.number in numbers) == (band == s.band and bool(s.free))
