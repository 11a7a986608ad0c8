"""Physical memory of a CUDA device, in granules: CUDA's virtual memory management (vAttention and kvcached work the same way).

A granule is one allocation and each place that shows it one mapping, so that any granule can be hidden alone: the driver unmaps
only what was mapped in one call. A granule gets its allocation when it is first shown, and is zeroed then.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from worker.memory.cuda_driver import VirtualMemory
from worker.memory.device_memory import DeviceMemory
from worker.memory.exports import Exported


class CudaMemory:
    """See `worker.memory.physical.PhysicalMemory`."""

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
        fresh = [granule for granule in granules if granule not in self._handles]
        try:
            for granule in granules:
                self._create(granule)
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

    def export(self, granules: Sequence[int]) -> Exported:
        """See `PhysicalMemory.export`: a handle a granule. Raises CudaError where the device has none to give."""
        fresh = [granule for granule in granules if granule not in self._handles]
        if fresh:  # what is shown first is zeroed then
            address = self._driver.reserve(len(fresh) * self._granule_bytes)
            self.show(address, fresh)
            self.hide(address, len(fresh))
            self._driver.free(address, len(fresh) * self._granule_bytes)
        files = tuple(self._driver.export(self._handles[granule]) for granule in granules)
        return Exported(self._granule_bytes, files, tuple((n, 0) for n in range(len(files))))

    def _create(self, granule: int) -> None:
        if granule not in self._handles:
            self._handles[granule] = self._driver.create(self._granule_bytes)

    def resident_bytes(self) -> int:
        """See `PhysicalMemory.resident_bytes`."""
        return len(self._handles) * self._granule_bytes

    def close(self) -> None:
        """See `PhysicalMemory.close`."""
        self.drop(list(self._handles))


def cuda_memory(driver: VirtualMemory, total_bytes: int, granule_bytes: int, device: torch.device) -> DeviceMemory:
    """`total_bytes` of memory of `device` in granules of `granule_bytes`. Raises ValueError when a size is not positive, or no multiple."""
    physical = CudaMemory(driver, granule_bytes, device)
    if total_bytes <= 0 or total_bytes % granule_bytes:
        raise ValueError(f"total_bytes {total_bytes} must be a positive multiple of the granule, {granule_bytes}")
    return DeviceMemory(physical, total_bytes // granule_bytes, granule_bytes)


class CudaWindow:
    """Granules of another process's device memory side by side in this one, from `address` on, readable and writable until `close`."""

    def __init__(self, driver: VirtualMemory, exported: Exported) -> None:
        """Raises CudaError. The descriptors may be closed afterwards."""
        self._driver, size = driver, exported.granule_bytes
        self.bytes = size * len(exported.places)
        self.address = driver.reserve(self.bytes)
        self._handles = [driver.adopt(exported.files[file]) for file, _ in exported.places]
        for n, handle in enumerate(self._handles):
            driver.map(self.address + n * size, size, handle)
        driver.allow(self.address, self.bytes)

    def close(self) -> None:
        """Nothing may refer to the range any more. Waits for the device."""
        self._driver.settle()
        size = self.bytes // max(len(self._handles), 1)
        for n, handle in enumerate(self._handles):
            self._driver.unmap(self.address + n * size, size)
            self._driver.release(handle)
        self._driver.free(self.address, self.bytes)


def _stretches(wanted: Sequence[bool]) -> list[tuple[int, int]]:
    """(first, count) of the maximal stretches of true entries."""
    found: list[tuple[int, int]] = []
    for n, wants in enumerate(wanted):
        if wants and found and found[-1][0] + found[-1][1] == n:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        elif wants:
            found.append((n, 1))
    return found
