"""Physical memory of the host "device": one memfd, whose granules are mapped into ranges that are reserved with PROT_NONE."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Iterator, Sequence

import torch

_PROT_NONE = 0
_MAP_FIXED, _MAP_NORESERVE, _MAP_POPULATE = 0x10, 0x4000, 0x8000
_MAP_FAILED = ctypes.c_void_p(-1).value
_FALLOC_PUNCH = 0x03  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_F_ADD_SEALS, _F_SEAL_SHRINK, _F_SEAL_GROW = 1033, 0x02, 0x04

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


class HostMemory:
    """See `worker.memory.granules.PhysicalMemory`. Granule n is bytes `n * granule_bytes` on of the memfd."""

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
        return _mmap(None, bytes_, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0)

    def release(self, address: int, bytes_: int) -> None:
        """See `PhysicalMemory.release`."""
        if _libc.munmap(address, bytes_):
            raise _os_error("munmap")

    def show(self, address: int, granules: Sequence[int]) -> None:
        """See `PhysicalMemory.show`."""
        size, flags = self._granule_bytes, mmap.MAP_SHARED | _MAP_FIXED | _MAP_POPULATE
        for first, count in _runs(granules):
            _mmap(address, count * size, mmap.PROT_READ | mmap.PROT_WRITE, flags, self._fd, first * size)
            address += count * size

    def hide(self, address: int, count: int) -> None:
        """See `PhysicalMemory.hide`."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        _mmap(address, count * self._granule_bytes, _PROT_NONE, flags, -1, 0)

    def drop(self, granules: Sequence[int]) -> None:
        """See `PhysicalMemory.drop`."""
        for first, count in _runs(granules):
            if _libc.fallocate(self._fd, _FALLOC_PUNCH, first * self._granule_bytes, count * self._granule_bytes):
                raise _os_error("fallocate")

    def resident_bytes(self) -> int:
        """See `PhysicalMemory.resident_bytes`; as the system counts it."""
        return os.fstat(self._fd).st_blocks * 512

    def close(self) -> None:
        """See `PhysicalMemory.close`."""
        os.close(self._fd)


def _runs(granules: Sequence[int]) -> Iterator[tuple[int, int]]:
    """`(first, count)` of the maximal runs of consecutive numbers, in the order given."""
    first = count = 0
    for granule in granules:
        if count and granule == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = granule, 1
    if count:
        yield first, count


def _mmap(address: int | None, bytes_: int, protection: int, flags: int, fd: int, offset: int) -> int:
    got = _libc.mmap(address, bytes_, protection, flags, fd, offset)
    if got is None or got == _MAP_FAILED:
        raise _os_error("mmap")
    return int(got)


def _os_error(call: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"{call}: {os.strerror(code)}")
