"""Physical memory of the host as a device: one memfd, whose granules are mapped into ranges reserved with PROT_NONE."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Sequence

import torch

from worker.memory import mappings
from worker.memory.exports import Exported
from worker.memory.physical import runs

_FALLOC_PUNCH = 0x03  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_F_ADD_SEALS, _F_SEAL_SHRINK, _F_SEAL_GROW = 1033, 0x02, 0x04

#: Written to pages so that they exist; small, so that it stays in the processor's cache.
_ZEROS = memoryview(bytes(256 << 10))

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


class HostMemory:
    """See `worker.memory.physical.PhysicalMemory`. Granule n begins at byte `n * granule_bytes` of the memfd."""

    def __init__(self, total_bytes: int, granule_bytes: int) -> None:
        """Raises ValueError when a size is not positive, or not a multiple (the granule of the system's page)."""
        if granule_bytes <= 0 or granule_bytes % mmap.PAGESIZE:
            raise ValueError(f"granule_bytes {granule_bytes} must be a positive multiple of {mmap.PAGESIZE}")
        if total_bytes <= 0 or total_bytes % granule_bytes:
            raise ValueError(f"total_bytes {total_bytes} must be a positive multiple of the granule, {granule_bytes}")
        self.device = torch.device("cpu")
        self._granule_bytes = granule_bytes
        self._fd = os.memfd_create("upbeat-hbm", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, total_bytes)
        # The memfd's size is final, so that a mapping can never lose its file.
        fcntl.fcntl(self._fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW)

    def reserve(self, bytes_: int) -> int:
        """See `PhysicalMemory.reserve`."""
        return mappings.reserve(bytes_)

    def release(self, address: int, bytes_: int) -> None:
        """See `PhysicalMemory.release`."""
        mappings.release(address, bytes_)

    def show(self, address: int, granules: Sequence[int], *, touch: bool = True) -> None:
        """See `PhysicalMemory.show`."""
        size = self._granule_bytes
        for first, count in runs(granules):
            mappings.show_file(address, count * size, self._fd, first * size, touch=touch)
            address += count * size

    def prepare(self, granule: int) -> None:
        """See `PhysicalMemory.prepare`. By writing zeros, as pages that fallocate makes are zeroed when they are
        mapped, and a mapping costs more than a write."""
        done, size = 0, self._granule_bytes
        while done < size:
            done += os.pwrite(self._fd, _ZEROS[: size - done], granule * size + done)

    def hide(self, address: int, count: int) -> None:
        """See `PhysicalMemory.hide`."""
        mappings.hide(address, count * self._granule_bytes)

    def drop(self, granules: Sequence[int]) -> None:
        """See `PhysicalMemory.drop`."""
        for first, count in runs(granules):
            if _libc.fallocate(self._fd, _FALLOC_PUNCH, first * self._granule_bytes, count * self._granule_bytes):
                raise mappings.os_error("fallocate")

    def export(self, granules: Sequence[int]) -> Exported:
        """See `PhysicalMemory.export`: one descriptor, the memfd. It gives access to all granules, so only trusted
        child processes may get it."""
        return Exported(
            self._granule_bytes, (os.dup(self._fd),), tuple((0, granule * self._granule_bytes) for granule in granules)
        )

    def resident_bytes(self) -> int:
        """See `PhysicalMemory.resident_bytes`; the system's count."""
        return os.fstat(self._fd).st_blocks * 512

    def close(self) -> None:
        """See `PhysicalMemory.close`."""
        os.close(self._fd)
