"""Copies between HBM pages and the arena on separate CUDA streams, and their order relative to compute.

A load is queued and returns at once; compute on its pages waits for that load on the device (`Fence`). A save waits on
the device for the compute before it, and blocks its calling thread. The whole arena is page-locked when adopted; if the
system refuses, copies are slower.

Invariants: the arena stays mapped while it is registered; loads end in the order in which they start.
"""

from __future__ import annotations

import collections
import threading
from typing import Protocol

import numpy as np

from runtime import telemetry
from worker.core.pages import Pages
from worker.memory.copier import Arena, UnderWay
from worker.memory.cuda_driver import CudaError
from worker.memory.cuda_streams import Mark, Stream
from worker.memory.paged_kv import PagedKv

log = telemetry.logger("worker.cuda")


class PageLocks(Protocol):
    """Page-locks host memory; raises CudaError when the system refuses."""

    def register(self, address: int, bytes_: int) -> None:
        """Page-locks a range."""
        ...

    def unregister(self, address: int) -> None:
        """Undoes `register`."""
        ...


class CudaCopier:
    """See `worker.memory.copier.Copier` and `Fence`. compute: the runner's stream. loads, saves: streams for this
    copier only."""

    run_bytes = 16 << 20

    def __init__(self, kv: PagedKv, locks: PageLocks, compute: Stream, loads: Stream, saves: Stream) -> None:
        self._kv, self._locks = kv, locks
        self._compute, self._loads, self._saves = compute, loads, saves
        self._lock = threading.Lock()
        #: Loads that may still run, oldest first, with their pages.
        self._under_way: collections.deque[tuple[Mark, frozenset[int]]] = collections.deque()
        self._written: Mark | None = None
        self._arena: Arena | None = None

    # ---- Copier ------------------------------------------------------------------------------------------------
    def adopt(self, arena: Arena) -> None:
        """See `Copier.adopt`."""
        self.drop()
        try:
            self._locks.register(arena.ctypes.data, arena.nbytes)
            self._arena = arena
        except CudaError as e:
            log.warning("the arena is not page-locked: copies are slower", arena_bytes=arena.nbytes, error=str(e))

    def drop(self) -> None:
        """Waits for loads and releases the arena. No copies may follow until `adopt`."""
        self.settle()
        if self._arena is not None:
            self._locks.unregister(self._arena.ctypes.data)
            self._arena = None

    def load(self, arena: Arena, offsets: Pages, pages: Pages) -> UnderWay | None:
        """See `Copier.load`."""
        if not len(pages):
            return None
        self._loads.copy(self._addresses(pages), offsets + arena.ctypes.data, self._kv.page_bytes)
        mark = self._loads.mark()
        with self._lock:
            self._under_way.append((mark, frozenset(pages.tolist())))
        return mark

    def save(self, arena: Arena, offsets: Pages, pages: Pages) -> None:
        """See `Copier.save`."""
        if self._written is not None:
            self._saves.wait_for(self._written)
        self._order(self._saves, frozenset(pages.tolist()))
        self._saves.copy(offsets + arena.ctypes.data, self._addresses(pages), self._kv.page_bytes)
        self._saves.mark().wait()

    def move(self, sources: Pages, targets: Pages) -> None:
        """See `Copier.move`."""
        self._order(self._compute, frozenset([*sources.tolist(), *targets.tolist()]))
        self._compute.copy(self._addresses(targets), self._addresses(sources), self._kv.page_bytes)
        mark = self._written = self._compute.mark()
        mark.wait()

    def settle(self) -> None:
        """See `Copier.settle`."""
        with self._lock:
            newest = self._under_way[-1][0] if self._under_way else None
        if newest is not None:
            newest.wait()

    # ---- Fence -------------------------------------------------------------------------------------------------
    @property
    def pending(self) -> bool:
        """See `Fence.pending`."""
        with self._lock:
            while self._under_way and self._under_way[0][0].reached():
                self._under_way.popleft()
            return bool(self._under_way)

    def wait_for(self, pages: Pages) -> None:
        """See `Fence.wait_for`."""
        self._order(self._compute, frozenset(pages.ravel().tolist()))

    def written(self) -> None:
        """See `Fence.written`."""
        self._written = self._compute.mark()

    def _order(self, stream: Stream, pages: frozenset[int]) -> None:
        """Makes `stream` wait for the last load into any of `pages`: loads run in order."""
        with self._lock:
            found = next((mark for mark, loaded in reversed(self._under_way) if not loaded.isdisjoint(pages)), None)
        if found is not None:
            stream.wait_for(found)

    def _addresses(self, pages: Pages) -> Pages:
        return np.asarray(self._kv.offsets(pages) + self._kv.span.address, np.int64)
