"""Allocates pages: slabs, bands of layers, and the fallback between bands.

A page holds one piece. Pages are grouped in slabs, each filled by one band of neighbouring layers,
so that purging last layers frees whole slabs. A page comes from the fullest slab of its own band, else from an unused
slab (which must then be mapped), else from another band's.

A pool has address space for `slab_count` slabs and may hold `limit` of them. A smaller limit unmaps unused slabs at
once and others when they become empty. `reach` is the limit that it could get from the rest of the device.

Invariants: a page is free in exactly one slab or taken; a slab that is not mapped has no taken page; more slabs than
the limit are mapped only while all of them are used.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from contracts.memory.layer_bands import band_of

Pages = npt.NDArray[np.int64]


@dataclass(slots=True)
class _Slab:
    """A mapped slab. band: -1 while no page is taken."""

    number: int
    free: list[int]
    band: int = -1


class _Open:
    """The used slabs of a band that have free pages. free: their number, by slab."""

    def __init__(self) -> None:
        self.free: dict[int, int] = {}
        self._first: int | None = None  #: the fullest slab, if known; not in the heap
        self._heap: list[tuple[int, int]] = []  #: (free, slab), with outdated entries

    def put(self, number: int, free: int) -> None:
        """The slab has so many free pages; 0: it is not among these slabs."""
        before = self.free.pop(number, 0)
        if free:
            self.free[number] = free
        if number == self._first:
            if 0 < free < before:
                return  # still the fullest
            self._first = None
        if not free:
            return
        if self._first is not None and (free, number) < (self.free[self._first], self._first):
            heapq.heappush(self._heap, (self.free[self._first], self._first))
            self._first = None
        heapq.heappush(self._heap, (free, number))
        if len(self._heap) > 4 * len(self.free) + 64:
            self._heap = [(free, number) for number, free in self.free.items() if number != self._first]
            heapq.heapify(self._heap)

    def fullest(self) -> int | None:
        """The slab with the fewest free pages, the first of several."""
        while self._first is None and self._heap:
            free, number = heapq.heappop(self._heap)
            self._first = number if self.free.get(number) == free else None
        return self._first


class PagePool:
    """The ledger of `slab_count` slabs of `pages_per_slab` pages for a model of `layers` layers.

    It does not map. `to_map` lists slabs to map before their pages are touched, `to_unmap` slabs to unmap before that;
    the owner of the memory clears both.
    """

    def __init__(self, slab_count: int, pages_per_slab: int, layers: int, bands: int = 4) -> None:
        self.pages_per_slab, self.layers = pages_per_slab, layers
        self.bands = max(1, min(bands, layers))
        self.slab_count = self._limit = slab_count
        self.reach = 0
        #: Pages that hold a piece.
        self.taken = 0
        self.to_map: list[int] = []
        self.to_unmap: list[int] = []
        #: Slabs that are mapped, or in `to_map`, by number; those of them without a taken page.
        self._slabs: dict[int, _Slab] = {}
        self._idle: list[int] = []
        #: Slabs that are not mapped: from `_fresh` on, and those that once were (a heap).
        self._fresh, self._returned = 0, list[int]()
        self._open = [_Open() for _ in range(self.bands)]
        self._bands = [band_of(layer, layers, self.bands) for layer in range(layers)]

    @property
    def held(self) -> int:
        """Slabs that are mapped, or in `to_map`."""
        return len(self._slabs)

    @property
    def used(self) -> int:
        """Slabs with a taken page."""
        return len(self._slabs) - len(self._idle)

    @property
    def limit(self) -> int:
        """Maximum number of mapped slabs."""
        return self._limit

    @property
    def total(self) -> int:
        """Maximum number of pages, with what the rest of the device could give."""
        return max(self._limit, self.reach) * self.pages_per_slab

    @property
    def free(self) -> int:
        """Pages that can be taken now, in used slabs and in slabs that may still be used."""
        return max(self._limit, self.used) * self.pages_per_slab - self.taken

    def set_limit(self, slabs: int) -> None:
        """Set the limit. Raises ValueError beyond the address space."""
        if not 0 <= slabs <= self.slab_count:
            raise ValueError(f"limit must be 0 to {self.slab_count} slabs, got {slabs}")
        self._limit = slabs
        while self.held > slabs and self._idle:
            self._unmap(self._idle.pop())

    def band_of(self, layer: int) -> int:
        """The band of a layer; later layers are in higher bands."""
        return self._bands[layer]

    def take(self, layer: int) -> int:
        """A page for a piece of this layer. Raises MemoryError when none is free."""
        band = self.band_of(layer)
        slab = self._fullest(band)
        if slab is None and self._may_begin:
            slab = self._slabs[self._idle.pop()] if self._idle else self._map()
            slab.band = band
        return self._take_from(slab or self._fullest_of_any())

    def _take_from(self, slab: _Slab | None) -> int:
        if slab is None:
            raise MemoryError("no free page")
        page = slab.free.pop()
        self._open[slab.band].put(slab.number, len(slab.free))
        self.taken += 1
        return page

    def give(self, pages: list[int]) -> None:
        """Return taken pages. Raises ValueError on a page that is free already."""
        given: dict[int, _Slab] = {}  # in the order of their last page
        try:
            for page in pages:
                number = page // self.pages_per_slab
                slab = given.pop(number, None) or self._slabs.get(number)
                if slab is None or slab.band < 0 or page in slab.free:
                    raise ValueError(f"page {page} is not taken")
                given[number] = slab
                slab.free.append(page)
                self.taken -= 1
        finally:
            for slab in given.values():
                self._gave(slab)

    def _gave(self, slab: _Slab) -> None:
        if len(slab.free) < self.pages_per_slab:
            self._open[slab.band].put(slab.number, len(slab.free))
            return
        self._open[slab.band].put(slab.number, 0)
        slab.band = -1
        if self.held > self._limit:
            self._unmap(slab.number)
        else:
            self._idle.append(slab.number)

    def move(self, slabs: Collection[int], layers: Mapping[int, int]) -> dict[int, int]:
        """Empty these slabs: each of their taken pages moves to a free page of another used slab.

        layers: the layer of each of these pages. Returns the new page of each, none of them in a slab of `to_map`.
        Raises MemoryError, changing nothing, when the other slabs have too few free pages.
        """
        closed = {*slabs, *self.to_map}
        shut = [(band, number) for band, opened in enumerate(self._open) for number in opened.free.keys() & closed]
        for band, number in shut:
            self._open[band].put(number, 0)
        try:
            if sum(sum(opened.free.values()) for opened in self._open) < len(layers):
                raise MemoryError("too few free pages in other slabs")
            moved = {
                page: self._take_from(self._fullest(self.band_of(layer)) or self._fullest_of_any())
                for page, layer in layers.items()
            }
        finally:
            for band, number in shut:
                self._open[band].put(number, len(self._slabs[number].free))
        self.give(list(layers))
        return moved

    def taken_by_slab(self) -> Pages:
        """Number of taken pages of each slab, int64 `[slabs]`, up to the highest mapped one."""
        found = np.zeros(max(self._slabs, default=-1) + 1, np.int64)
        for number, slab in self._slabs.items():
            found[number] = self.pages_per_slab - len(slab.free)
        return found

    def band_of_slab(self, slab: int) -> int:
        """The band that fills a mapped slab; -1: none."""
        return self._slabs[slab].band

    @property
    def _may_begin(self) -> bool:
        """Whether one more slab may be used. An idle one counts as held already."""
        return bool(self._idle) or self.held < min(self._limit, self.slab_count)

    def _map(self) -> _Slab:
        if self._returned:
            number = heapq.heappop(self._returned)
        else:
            number, self._fresh = self._fresh, self._fresh + 1
        first = number * self.pages_per_slab
        slab = self._slabs[number] = _Slab(number, list(range(first + self.pages_per_slab - 1, first - 1, -1)))
        _ask(number, self.to_map, self.to_unmap)
        return slab

    def _unmap(self, number: int) -> None:
        del self._slabs[number]
        heapq.heappush(self._returned, number)
        _ask(number, self.to_unmap, self.to_map)

    def _fullest(self, band: int) -> _Slab | None:
        number = self._open[band].fullest()
        return None if number is None else self._slabs[number]

    def _fullest_of_any(self) -> _Slab | None:
        return next((s for b in range(self.bands - 1, -1, -1) if (s := self._fullest(b)) is not None), None)

    def validate(self) -> None:
        """Raise AssertionError when the ledger contradicts itself."""
        slabs = self._slabs.values()
        assert self.taken == sum(self.pages_per_slab - len(s.free) for s in slabs)
        assert self.held <= self._limit or not self._idle, "memory is kept beyond the limit"
        assert not set(self.to_map) & set(self.to_unmap)
        assert set(self._slabs) | set(self._returned) == set(range(self._fresh)), "a slab is mapped and not, or neither"
        assert len(self._slabs) + len(self._returned) == self._fresh <= self.slab_count
        assert sorted(self._idle) == sorted(s.number for s in slabs if s.band < 0)
        free = [p for s in slabs for p in s.free]
        assert len(set(free)) == len(free)
        assert [p // self.pages_per_slab for p in free] == [s.number for s in slabs for _ in s.free]
        for s in slabs:
            assert (len(s.free) < self.pages_per_slab) == (s.band >= 0)
        for band, opened in enumerate(self._open):
            assert opened.free == {s.number: len(s.free) for s in slabs if s.band == band and s.free}


def _ask(number: int, wanted: list[int], opposite: list[int]) -> None:
    """Request an action for a slab, or cancel the opposite request."""
    if number in opposite:
        opposite.remove(number)
    else:
        wanted.append(number)
