"""The interface of a device's memory: physical granules, and address ranges that show (map) them.

Semantics of CUDA's virtual memory management (reserve a range, create physical memory, map, unmap) on every device: by
a memfd on the host (`host_memory`), by the driver on CUDA (`cuda_memory`). kvcached and vAttention do the same. With a
plain allocator, weights could not lend memory to the KV cache without copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from worker.memory.exports import Exported


class PhysicalMemory(Protocol):
    """Granules, by number, and address ranges that show them. Callers show a granule in at most one place."""

    #: The device of tensors over the ranges.
    device: torch.device

    def reserve(self, bytes_: int) -> int:
        """Reserves an empty range of whole granules and returns its address."""
        ...

    def release(self, address: int, bytes_: int) -> None:
        """Releases a range; everything in it must be hidden."""
        ...

    def show(self, address: int, granules: Sequence[int], *, touch: bool = True) -> None:
        """Maps `granules` contiguously from `address` on. Granules without memory get zeroed memory. touch: False: the
        caller writes all of it, so its content may be undefined, and the system may allocate it on first access. Any
        thread, unless the same granules are shown, hidden or dropped meanwhile."""
        ...

    def prepare(self, granule: int) -> None:
        """Allocates the memory of a granule that has none and is shown nowhere, so that showing it costs no page fault.
        Raises OSError or UpbeatError where the system has no memory."""
        ...

    def hide(self, address: int, count: int) -> None:
        """Unmaps `count` granules from `address` on; they keep their content. The range must be unused."""
        ...

    def drop(self, granules: Sequence[int]) -> None:
        """Returns the memory of hidden granules to the system; content is lost."""
        ...

    def export(self, granules: Sequence[int]) -> Exported:
        """Handles with which another process maps these granules too. Granules without memory get zeroed memory now."""
        ...

    def resident_bytes(self) -> int:
        """Physical memory of all granules now."""
        ...

    def close(self) -> None:
        """Frees all memory; all ranges must be released."""
        ...


def runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """`(first, count)` of the maximal runs of consecutive numbers, in the order given."""
    first = count = 0
    for number in numbers:
        if count and number == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = number, 1
    if count:
        yield first, count
