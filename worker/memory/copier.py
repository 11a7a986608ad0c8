"""How bytes move between HBM pages and the arena: one seam, with a host and a CUDA side.

A load may be under way when `load` returns; whoever computes with its pages asks the copier's `Fence` first. A save has ended when
`save` returns. What may be copied where, and when, is the loader's and the engine's decision.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from worker.memory.paged_kv import PagedKv

Arena = npt.NDArray[np.uint8]


class UnderWay(Protocol):
    """Copies that were begun and have not ended."""

    def wait(self) -> None:
        """Return when they have; any thread."""
        ...


class Copier(Protocol):
    """Copies whole pages. One thread loads and one saves; `settle` is any thread's."""

    def load(self, arena: Arena, offsets: Sequence[int], pages: Sequence[int]) -> UnderWay | None:
        """Begin copying the page-sized bytes at `offsets` of `arena` into `pages`. None: they are there.

        Offsets lie within the arena, and pages are mapped; both are kept so until the copies have ended.
        """
        ...

    def save(self, arena: Arena, offsets: Sequence[int], pages: Sequence[int]) -> None:
        """Copy `pages` to `offsets` of `arena`; their bytes are there when this returns."""
        ...

    def settle(self) -> None:
        """Return when no load that was begun before is under way."""
        ...


class HostCopier:
    """Plain `memmove`s, without the interpreter lock."""

    def __init__(self, kv: PagedKv) -> None:
        self._kv = kv

    def load(self, arena: Arena, offsets: Sequence[int], pages: Sequence[int]) -> UnderWay | None:
        """See `Copier.load`."""
        base, size = arena.ctypes.data, self._kv.page_bytes
        for offset, page in zip(offsets, pages, strict=True):
            ctypes.memmove(self._kv.page_bytes_view(page).ctypes.data, base + offset, size)
        return None

    def save(self, arena: Arena, offsets: Sequence[int], pages: Sequence[int]) -> None:
        """See `Copier.save`."""
        base, size = arena.ctypes.data, self._kv.page_bytes
        for offset, page in zip(offsets, pages, strict=True):
            ctypes.memmove(base + offset, self._kv.page_bytes_view(page).ctypes.data, size)

    def settle(self) -> None:
        """Nothing is ever under way."""
