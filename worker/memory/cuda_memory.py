"""Physical memory of a CUDA device in granules, by CUDA's virtual memory management (like vAttention and kvcached).

Each granule is one allocation with its own mapping, because the driver unmaps only whole mappings. A granule is
allocated, and zeroed unless its user writes all of it, when it is first shown (mapped), if it was not prepared.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from worker.memory.cuda_driver import VirtualMemory
from worker.memory.device_memory import DeviceMemory
from worker.memory.exports import Exported
from worker.memory.physical import runs


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

    def show(self, address: int, granules: Sequence[int], *, touch: bool = True) -> None:
        """See `PhysicalMemory.show`. Undone if the driver refuses part of it."""
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
            for first, count in runs([n for n, granule in enumerate(granules) if touch and granule in new]):
                self._driver.zero(address + first * size, count * size)
        except BaseException:
            if begun:
                self._driver.unmap(address, begun * size)
            self.drop(fresh)
            raise

    def prepare(self, granule: int) -> None:
        """See `PhysicalMemory.prepare`. Its content stays undefined."""
        self._create(granule)

    def hide(self, address: int, count: int) -> None:
        """See `PhysicalMemory.hide`. Waits until the device is idle, as queued work may use the range."""
        self._driver.settle()
        self._driver.unmap(address, count * self._granule_bytes)

    def drop(self, granules: Sequence[int]) -> None:
        """See `PhysicalMemory.drop`."""
        for granule in granules:
            if (handle := self._handles.pop(granule, None)) is not None:
                self._driver.release(handle)

    def export(self, granules: Sequence[int]) -> Exported:
        """See `PhysicalMemory.export`: one handle per granule. Raises CudaError if the device does not support it."""
        fresh = [granule for granule in granules if granule not in self._handles]
        if fresh:  # showing them once allocates and zeroes them
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
    """`total_bytes` of memory of `device` in granules of `granule_bytes`. Raises ValueError when a size is not positive
    or not a multiple."""
    physical = CudaMemory(driver, granule_bytes, device)
    if total_bytes <= 0 or total_bytes % granule_bytes:
        raise ValueError(f"total_bytes {total_bytes} must be a positive multiple of the granule, {granule_bytes}")
    return DeviceMemory(physical, total_bytes // granule_bytes, granule_bytes)


class CudaWindow:
    """Granules of another process's device memory, mapped contiguously from `address`, readable and writable until
    `close`."""

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
        """Unmaps the range, which must be unused. Waits until the device is idle."""
        self._driver.settle()
        self._driver.unmap(self.address, self.bytes)
        for handle in self._handles:
            self._driver.release(handle)
        self._driver.free(self.address, self.bytes)
