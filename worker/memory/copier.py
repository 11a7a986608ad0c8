"""How bytes move between HBM pages and the arena: one seam, with a host and a CUDA side. Offsets and pages are int64 `[n]`.

A load may be under way when `load` returns; whoever computes with its pages asks the copier's `Fence` first. A save has ended when
`save` returns. What may be copied where, and when, is the loader's and the engine's decision.
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
    """Copies that were begun and have not ended."""

    def wait(self) -> None:
        """Return when they have; any thread."""
        ...


class Copier(Protocol):
    """Copies whole pages. One thread adopts and loads, and one saves; `settle` is any thread's."""

    def adopt(self, arena: Arena) -> None:
        """From now on this arena is copied from and to, and none that came before."""
        ...

    def load(self, arena: Arena, offsets: Pages, pages: Pages) -> UnderWay | None:
        """Begin copying the page-sized bytes at `offsets` of `arena` into `pages`. None: they are there.

        Offsets lie within the arena, and pages are mapped; both are kept so until the copies have ended.
        """
        ...

    def save(self, arena: Arena, offsets: Pages, pages: Pages) -> None:
        """Copy `pages` to `offsets` of `arena`; their bytes are there when this returns.

        The pages' layer was computed when this is called, or comes earlier in the device's order than anything begun from now on.
        """
        ...

    def settle(self) -> None:
        """Return when no load that was begun before is under way."""
        ...


class HostCopier:
    """Copies within host memory: a call is one run of copies without the interpreter lock, and nothing is left under way."""

    def __init__(self, kv: PagedKv, copy: Copy | None = None) -> None:
        """copy: the fastest on this machine unless given."""
        self._kv, self._copy = kv, copy or fastest_copy()

    def adopt(self, arena: Arena) -> None:
        """Nothing need be prepared."""

    def load(self, arena: Arena, offsets: Pages, pages: Pages) -> UnderWay | None:
        """See `Copier.load`."""
        self._copy(self._addresses(pages), offsets + arena.ctypes.data, self._kv.page_bytes)
        return None

    def save(self, arena: Arena, offsets: Pages, pages: Pages) -> None:
        """See `Copier.save`."""
        self._copy(offsets + arena.ctypes.data, self._addresses(pages), self._kv.page_bytes)

    def settle(self) -> None:
        """Nothing is ever under way."""

    def _addresses(self, pages: Pages) -> Pages:
        return np.asarray(self._kv.offsets(pages) + self._kv.span.address, np.int64)


class Fence(Protocol):
    """Orders what computes with pages behind what copies them, and the other way round. The engine's thread."""

    @property
    def pending(self) -> bool:
        """Whether any load may be under way; false means that nothing need be waited for."""
        ...

    def wait_for(self, pages: Pages) -> None:
        """What is queued for computing from now on runs after the loads under way into any of `pages`."""
        ...

    def written(self) -> None:
        """A save that begins from now on runs after what was queued for computing so far."""
        ...


class HostFence:
    """For copies that have ended when they return, and compute that has when its step does."""

    pending = False

    def wait_for(self, pages: Pages) -> None:
        """Nothing is ever under way."""

    def written(self) -> None:
        """What was computed is written already."""
