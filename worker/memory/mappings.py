"""Address ranges of this process by mmap and munmap: reserve, map a file, unmap, release."""

from __future__ import annotations

import ctypes
import mmap
import os

_PROT_NONE = 0
_MAP_FIXED, _MAP_NORESERVE, _MAP_POPULATE = 0x10, 0x4000, 0x8000
_MAP_FAILED = ctypes.c_void_p(-1).value
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def reserve(bytes_: int) -> int:
    """Reserves an inaccessible range and returns its address. Raises OSError."""
    return _mmap(None, bytes_, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0)


def show_file(address: int, bytes_: int, fd: int, offset: int, *, touch: bool = True) -> None:
    """Maps `bytes_` of a file from `offset` on at `address`, readable and writable. touch: allocates its memory now,
    not on first access."""
    flags = mmap.MAP_SHARED | _MAP_FIXED
    _mmap(address, bytes_, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset)
    if touch and not populate(address, bytes_):
        _mmap(address, bytes_, mmap.PROT_READ | mmap.PROT_WRITE, flags | _MAP_POPULATE, fd, offset)


def populate(address: int, bytes_: int) -> bool:
    """Makes the pages of a mapped range present for writing, in one call: a fifth of a fault for each. False where the
    system cannot. MAP_POPULATE faults for reading only, which bench/balloon found slower, and so is the first write
    after it."""
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    return not _libc.madvise(begin, address + bytes_ - begin, _POPULATE_WRITE)


def hide(address: int, bytes_: int) -> None:
    """Unmaps `bytes_` at `address`, which stays reserved and inaccessible."""
    _mmap(address, bytes_, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED, -1, 0)


def release(address: int, bytes_: int) -> None:
    """Releases a range and its mappings."""
    if _libc.munmap(address, bytes_):
        raise os_error("munmap")


def os_error(call: str) -> OSError:
    """The OSError for a libc call that has just failed."""
    code = ctypes.get_errno()
    return OSError(code, f"{call}: {os.strerror(code)}")


def _mmap(address: int | None, bytes_: int, protection: int, flags: int, fd: int, offset: int) -> int:
    got = _libc.mmap(address, bytes_, protection, flags, fd, offset)
    if got is None or got == _MAP_FAILED:
        raise os_error("mmap")
    return int(got)
