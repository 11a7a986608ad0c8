"""The physical pool of a device: which granule is free, and which address range shows it.

The semantics are those of CUDA's virtual memory management (reserve a range, create physical memory, map, unmap) on every
device; what does it is a `PhysicalMemory`: a memfd on the host (`host_memory`), the driver on CUDA (`cuda_memory`). A granule keeps
its content while it moves between spans; what is given back loses its content, and the memory returns to the system at once. Prior
art: kvcached and vAttention do this over CUDA VMM; a plain allocator could not lend a weight's memory to the KV cache without
copying everything around it.

Not decided here: who gets a granule. Not safe for concurrent use: the worker's one ledger calls it from one thread.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from typing import Protocol

import torch

from contracts.errors import UpbeatError
from worker.memory.host_memory import HostMemory

_FREE, _HELD = -2, -1  # states of a granule that no span shows; otherwise the span's number


class OutOfGranules(UpbeatError, MemoryError):
    """The pool has fewer free granules than were asked for; nothing was taken."""


class GranuleMisuse(UpbeatError, ValueError):
    """A granule is mapped twice, given back while mapped, or a range is outside its span. Nothing was changed."""


class PhysicalMemory(Protocol):
    """Granules, by number, and address ranges that show them. Callers keep every granule in one place at most."""

    #: Where tensors over the ranges live.
    device: torch.device

    def reserve(self, bytes_: int) -> int:
        """The address of a fresh range of whole granules that shows nothing."""
        ...

    def release(self, address: int, bytes_: int) -> None:
        """Gives a range back; what it shows is hidden first."""
        ...

    def show(self, address: int, granules: Sequence[int]) -> None:
        """Shows `granules` side by side from `address` on. One without memory gets some, all zero, now."""
        ...

    def hide(self, address: int, count: int) -> None:
        """Shows nothing any more in `count` granules from `address` on. Their content stays. Nothing may use the range now."""
        ...

    def drop(self, granules: Sequence[int]) -> None:
        """Returns the memory of hidden granules to the system; content is lost."""
        ...

    def resident_bytes(self) -> int:
        """Physical memory that granules have now."""
        ...

    def close(self) -> None:
        """Ends all of it; every range was released before."""
        ...


class GranulePool:
    """`total` granules of `granule_bytes` each, over one physical memory.

    Every granule is in exactly one state: free (in the pool), held (taken, shown nowhere) or mapped (taken, shown by
    exactly one span). Physical memory is used by granules that were mapped since they were taken, and by no others.
    """

    def __init__(self, memory: PhysicalMemory, total: int, granule_bytes: int) -> None:
        self.memory = memory
        self.device = memory.device
        self.granule_bytes = granule_bytes
        self.total = total
        self._free = list(range(self.total))  # a heap: lowest numbers first, so that runs stay contiguous
        self._state = [_FREE] * self.total
        self._spans: dict[int, Span] = {}
        self._numbers = itertools.count()

    @property
    def free(self) -> int:
        """Granules that can be taken."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Takes `count` granules, content all zero. Raises OutOfGranules when fewer are free; then nothing changes."""
        if count > len(self._free):
            raise OutOfGranules(f"{count} granules of {self.granule_bytes} bytes wanted, {len(self._free)} of {self.total} free")
        taken = [heapq.heappop(self._free) for _ in range(count)]
        for granule in taken:
            self._state[granule] = _HELD
        return taken

    def give(self, granules: Sequence[int]) -> None:
        """Returns held granules and releases their memory. Raises GranuleMisuse, changing nothing, unless all are held."""
        self._require_held(granules)
        self.memory.drop(granules)
        for granule in granules:
            self._state[granule] = _FREE
            heapq.heappush(self._free, granule)

    def reserve(self, bytes_: int) -> Span:
        """An address range of at least `bytes_`, rounded up to whole granules, that shows nothing yet."""
        if bytes_ <= 0:
            raise ValueError(f"cannot reserve {bytes_} bytes")
        count = -(-bytes_ // self.granule_bytes)
        span = Span(self, next(self._numbers), count)
        self._spans[span.number] = span
        return span

    def resident_bytes(self) -> int:
        """Physical memory that the pool uses now."""
        return self.memory.resident_bytes()

    def close(self) -> None:
        """Closes all spans and the pool. Tensors over any of it must not be touched any more."""
        for span in list(self._spans.values()):
            span.close()
        self.memory.close()

    def validate(self) -> None:
        """Raises AssertionError unless every granule is in exactly one place."""
        shown = [(granule, span.number) for span in self._spans.values() for _, granule in span.mapped()]
        assert len({granule for granule, _ in shown}) == len(shown), "a granule is mapped twice"
        for granule, number in shown:
            assert self._state[granule] == number, f"granule {granule} is in span {number}, its state says {self._state[granule]}"
        assert sum(1 for s in self._state if s >= 0) == len(shown), "a granule counts as mapped and is not"
        assert sorted(self._free) == [g for g, s in enumerate(self._state) if s == _FREE], "the free list and the states differ"

    def _require_held(self, granules: Sequence[int]) -> None:
        if len(set(granules)) != len(granules):
            raise GranuleMisuse("a granule is named twice")
        for granule in granules:
            if not 0 <= granule < self.total or self._state[granule] != _HELD:
                raise GranuleMisuse(f"granule {granule} is not held: it is free, mapped or unknown")


class Span:
    """A reserved address range, in granules; made by `GranulePool.reserve`.

    `address` is stable until `close`. Reading or writing where no granule is mapped kills the process, as it does on a
    device: the ledger, not this class, keeps that from happening.
    """

    def __init__(self, pool: GranulePool, number: int, count: int) -> None:
        self.pool = pool
        self.number = number
        self.granules = count
        self.bytes = count * pool.granule_bytes
        self.address = pool.memory.reserve(self.bytes)
        self._at: dict[int, int] = {}

    def map(self, at_granule: int, granules: Sequence[int]) -> None:
        """Shows held `granules` from granule `at_granule` of this span on. Their memory is allocated now, not on first touch.

        Raises GranuleMisuse, changing nothing, when one is not held or the place is taken or outside.
        """
        self._require_inside(at_granule, len(granules))
        self.pool._require_held(granules)
        if any(at in self._at for at in range(at_granule, at_granule + len(granules))):
            raise GranuleMisuse(f"span {self.number} shows something in {at_granule}..{at_granule + len(granules)} already")
        self.pool.memory.show(self.address + at_granule * self.pool.granule_bytes, granules)
        for at, granule in enumerate(granules, at_granule):
            self._at[at] = granule
            self.pool._state[granule] = self.number

    def unmap(self, at_granule: int, count: int) -> list[int]:
        """Hides `count` granules and returns their numbers, held and with their content.

        Raises GranuleMisuse, changing nothing, unless all of the range shows something.
        """
        self._require_inside(at_granule, count)
        if any(at not in self._at for at in range(at_granule, at_granule + count)):
            raise GranuleMisuse(f"span {self.number} shows nothing in part of {at_granule}..{at_granule + count}")
        if count == 0:
            return []
        self.pool.memory.hide(self.address + at_granule * self.pool.granule_bytes, count)
        hidden = [self._at.pop(at) for at in range(at_granule, at_granule + count)]
        for granule in hidden:
            self.pool._state[granule] = _HELD
        return hidden

    def mapped(self) -> list[tuple[int, int]]:
        """`(place, granule)` of everything shown, by place."""
        return sorted(self._at.items())

    def close(self) -> None:
        """Gives back what is still shown and the address range. Calling it twice is harmless."""
        if self.pool._spans.pop(self.number, None) is None:
            return
        held = []
        for at, granule in self.mapped():
            self.pool.memory.hide(self.address + at * self.pool.granule_bytes, 1)
            self.pool._state[granule] = _HELD
            held.append(granule)
        self._at.clear()
        self.pool.memory.release(self.address, self.bytes)
        self.pool.give(held)

    def _require_inside(self, at_granule: int, count: int) -> None:
        if at_granule < 0 or count < 0 or at_granule + count > self.granules:
            raise GranuleMisuse(f"{at_granule}..{at_granule + count} is outside span {self.number} of {self.granules} granules")


class HostPool(GranulePool):
    """`total_bytes` of host memory in granules of `granule_bytes`."""

    def __init__(self, total_bytes: int, granule_bytes: int) -> None:
        """Raises ValueError when a size is not positive, or not a multiple (the granule of the system's page)."""
        super().__init__(HostMemory(total_bytes, granule_bytes), total_bytes // granule_bytes, granule_bytes)
