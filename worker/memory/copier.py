"""Copies between HBM pages and the arena: the interface, and its host implementation. Offsets and pages are int64
`[n]`.

A load may still run when `load` returns; compute that uses its pages must wait by the copier's `Fence`. A save has
ended when `save` returns. Loader and engine decide what is copied and when.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from worker.core.pages import Pages
from worker.memory.copies import Copy, fastest_copy
from worker.memory.paged_kv import PagedKv

Arena = npt.NDArray[np.uint8]


class UnderWay(Protocol):
    """Running copies."""

    def wait(self) -> None:
        """Returns when they have ended; any thread."""
        ...


class Copier(Protocol):
    """Copies whole pages. One thread calls `adopt` and `load`, one `save`; any thread may call `settle`."""

    #: Bytes that a call of `load` should copy: some tenths of a millisecond.
    run_bytes: int

    def adopt(self, arena: Arena) -> None:
        """From now on, copies use this arena only."""
        ...

    def load(self, arena: Arena, offsets: Pages, pages: Pages) -> UnderWay | None:
        """Starts copying page-sized pieces at `offsets` of `arena` into `pages`. None: the copies have ended.

        Offsets must lie within the arena and pages must be mapped until the copies have ended.
        """
        ...

    def save(self, arena: Arena, offsets: Pages, pages: Pages) -> None:
        """Copies `pages` to `offsets` of `arena`; complete when it returns.

        The pages' layer must be computed, or queued on the device, before the call.
        """
        ...

    def move(self, sources: Pages, targets: Pages) -> None:
        """Copies pages to other pages, after the compute and the loads so far; complete when it returns. No page is in
        both. On the engine's thread."""
        ...

    def settle(self) -> None:
        """Returns when all loads started before have ended."""
        ...


class HostCopier:
    """Copies within host memory. Each call is one native run without the interpreter lock, complete when it returns."""

    run_bytes = 2 << 20

    def __init__(self, kv: PagedKv, copy: Copy | None = None) -> None:
        """copy: the copy function; default: the fastest on this machine."""
        self._kv, self._copy = kv, copy or fastest_copy()

    def adopt(self, arena: Arena) -> None:
        """Nothing to prepare."""

    def load(self, arena: Arena, offsets: Pages, pages: Pages) -> UnderWay | None:
        """See `Copier.load`."""
        self._copy(self._addresses(pages), offsets + arena.ctypes.data, self._kv.page_bytes)
        return None

    def save(self, arena: Arena, offsets: Pages, pages: Pages) -> None:
        """See `Copier.save`."""
        self._copy(offsets + arena.ctypes.data, self._addresses(pages), self._kv.page_bytes)

    def move(self, sources: Pages, targets: Pages) -> None:
        """See `Copier.move`."""
        self._copy(self._addresses(targets), self._addresses(sources), self._kv.page_bytes)

    def settle(self) -> None:
        """Copies have always ended."""

    def _addresses(self, pages: Pages) -> Pages:
        return np.asarray(self._kv.offsets(pages) + self._kv.span.address, np.int64)


class Fence(Protocol):
    """Orders compute after loads of its pages, and saves after compute. Called on the engine's thread."""

    @property
    def pending(self) -> bool:
        """Whether any load may still run; if False, no wait is needed."""
        ...

    def wait_for(self, pages: Pages) -> None:
        """Compute queued from now on runs after the running loads into any of `pages`."""
        ...

    def written(self) -> None:
        """Saves started from now on run after the compute queued so far."""
        ...


class HostFence:
    """The fence of synchronous copies and compute."""

    pending = False

    def wait_for(self, pages: Pages) -> None:
        """Loads have always ended."""

    def written(self) -> None:
        """Compute has always ended."""
