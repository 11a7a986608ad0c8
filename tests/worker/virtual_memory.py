"""The CUDA driver's virtual memory on the host, with its rules: what the real one forbids raises here, or kills the
process."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os

from worker.memory.cuda_driver import CudaError

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FIXED, _NORESERVE, _NONE = 0x10, 0x4000, 0


class HostVirtualMemory:
    """`worker.memory.cuda_driver.VirtualMemory`. Fresh memory holds garbage; mapped memory cannot be touched before
    `allow`.

    most: bytes of physical memory; more are refused, as by a device that others use too.
    """

    def __init__(self, granularity_bytes: int = 4096, most: int = 1 << 40) -> None:
        self.granularity_bytes, self.most = granularity_bytes, most
        self.ranges: dict[int, int] = {}
        self.mapped: dict[int, tuple[int, int]] = {}  # address: (bytes, handle)
        self.sizes: dict[int, int] = {}
        self.allowed: set[int] = set()
        self.settled = 0
        self._files: dict[int, int] = {}
        self._handles = itertools.count(1)

    def reserve(self, bytes_: int) -> int:
        self._aligned(bytes_)
        address = _libc.mmap(None, bytes_, _NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE, -1, 0)
        self.ranges[address] = bytes_
        return int(address)

    def free(self, address: int, bytes_: int) -> None:
        if self.ranges.get(address) != bytes_ or any(address <= at < address + bytes_ for at in self.mapped):
            raise CudaError("cuMemAddressFree: not a range that shows nothing")
        del self.ranges[address]
        _libc.munmap(address, bytes_)

    def create(self, bytes_: int) -> int:
        self._aligned(bytes_)
        if sum(self.sizes.values()) + bytes_ > self.most:
            raise CudaError("cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY")
        handle = next(self._handles)
        self._files[handle], self.sizes[handle] = os.memfd_create(f"handle-{handle}"), bytes_
        os.write(self._files[handle], b"\xab" * bytes_)
        return handle

    def release(self, handle: int) -> None:
        if any(shown == handle for _, shown in self.mapped.values()):
            raise CudaError("cuMemRelease: still mapped")
        os.close(self._files.pop(handle))
        del self.sizes[handle]

    def export(self, handle: int) -> int:
        return os.dup(self._files[handle])

    def adopt(self, file: int) -> int:
        handle = next(self._handles)
        self._files[handle], self.sizes[handle] = os.dup(file), os.fstat(file).st_size
        return handle

    def map(self, address: int, bytes_: int, handle: int) -> None:
        self._aligned(address, bytes_)
        inside = any(begin <= address and address + bytes_ <= begin + size for begin, size in self.ranges.items())
        taken = any(at < address + bytes_ and address < at + size for at, (size, _) in self.mapped.items())
        if not inside or taken or self.sizes[handle] != bytes_:
            raise CudaError("cuMemMap: outside of a reservation, taken, or of another size")
        _libc.mmap(address, bytes_, _NONE, mmap.MAP_SHARED | _FIXED, self._files[handle], 0)
        self.mapped[address] = (bytes_, handle)

    def allow(self, address: int, bytes_: int) -> None:
        at = address
        while at < address + bytes_:
            if at not in self.mapped:
                raise CudaError("cuMemSetAccess: not mapped whole")
            self.allowed.add(at)
            at += self.mapped[at][0]
        _libc.mprotect(address, bytes_, mmap.PROT_READ | mmap.PROT_WRITE)

    def unmap(self, address: int, bytes_: int) -> None:
        found, at = list[int](), address
        while at < address + bytes_ and at in self.mapped:
            found.append(at)
            at += self.mapped[at][0]
        if at != address + bytes_:
            raise CudaError("cuMemUnmap: not whole mappings without gaps")
        if not self.settled:
            raise CudaError("cuMemUnmap: the device may still use it")
        for at in found:
            del self.mapped[at]
            self.allowed.discard(at)
        _libc.mmap(address, bytes_, _NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE | _FIXED, -1, 0)

    def zero(self, address: int, bytes_: int) -> None:
        ctypes.memset(address, 0, bytes_)

    def settle(self) -> None:
        self.settled += 1

    def _aligned(self, *values: int) -> None:
        if any(value % self.granularity_bytes for value in values):
            raise CudaError("a size or address is not aligned")
