"""Physical memory of a CUDA device, in granules: CUDA's virtual memory management (vAttention and kvcached work the same way).

A granule is one allocation and each place that shows it one mapping, so that any granule can be hidden alone: the driver unmaps
only what was mapped in one call. A granule gets its allocation when it is first shown, and is zeroed then.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from worker.memory.cuda_driver import VirtualMemory
from worker.memory.granules import GranulePool


class CudaMemory:
    """See `worker.memory.granules.PhysicalMemory`."""

    def __init__(self, driver: VirtualMemory, granule_bytes: int, device: torch.device) -> None:
        """Raises ValueError unless `granule_bytes` is a positive multiple of what the driver maps."""
        if granule_bytes <= 0 or granule_bytes % driver.granularity_bytes:
            raise ValueError(f"granule_bytes {granule_bytes} must be a positive multiple of {driver.granularity_bytes}")
        self.device = device
        self._driver, self._granule_bytes = driver, granule_bytes
        self._handles: dict[int, int] = {}

    def reserve(self, bytes_: int) -> int:
        """See `PhysicalMemory.reserve`."""
        return self._driver.reserve(bytes_)

    def release(self, address: int, bytes_: int) -> None:
        """See `PhysicalMemory.release`."""
        self._driver.free(address, bytes_)

    def show(self, address: int, granules: Sequence[int]) -> None:
        """See `PhysicalMemory.show`. When the driver refuses, nothing is shown."""
        size, begun = self._granule_bytes, 0
        fresh: list[int] = []
        try:
            for granule in granules:
                if granule not in self._handles:
                    self._handles[granule] = self._driver.create(size)
                    fresh.append(granule)
                self._driver.map(address + begun * size, size, self._handles[granule])
                begun += 1
            if begun:
                self._driver.allow(address, begun * size)
            new = set(fresh)
            for first, count in _stretches([granule in new for granule in granules]):
                self._driver.zero(address + first * size, count * size)
        except BaseException:
            for n in range(begun):
                self._driver.unmap(address + n * size, size)
            self.drop(fresh)
            raise

    def hide(self, address: int, count: int) -> None:
        """See `PhysicalMemory.hide`. Waits for the device: what was queued before may still use the range."""
        self._driver.settle()
        for n in range(count):
            self._driver.unmap(address + n * self._granule_bytes, self._granule_bytes)

    def drop(self, granules: Sequence[int]) -> None:
        """See `PhysicalMemory.drop`."""
        for granule in granules:
            if (handle := self._handles.pop(granule, None)) is not None:
                self._driver.release(handle)

    def resident_bytes(self) -> int:
        """See `PhysicalMemory.resident_bytes`."""
        return len(self._handles) * self._granule_bytes

    def close(self) -> None:
        """See `PhysicalMemory.close`."""
        self.drop(list(self._handles))


class CudaPool(GranulePool):
    """`total_bytes` of memory of `device` in granules of `granule_bytes`."""

    def __init__(self, driver: VirtualMemory, total_bytes: int, granule_bytes: int, device: torch.device) -> None:
        """Raises ValueError when a size is not positive, or not a multiple."""
        memory = CudaMemory(driver, granule_bytes, device)
        if total_bytes <= 0 or total_bytes % granule_bytes:
            raise ValueError(f"total_bytes {total_bytes} must be a positive multiple of the granule, {granule_bytes}")
        super().__init__(memory, total_bytes // granule_bytes, granule_bytes)


def _stretches(wanted: Sequence[bool]) -> list[tuple[int, int]]:
    """(first, count) of the maximal stretches of true entries."""
    found: list[tuple[int, int]] = []
    for n, wants in enumerate(wanted):
        if wants and found and found[-1][0] + found[-1][1] == n:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        elif wants:
            found.append((n, 1))
    return found
