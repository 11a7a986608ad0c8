"""Whether the kernel's page cache holds parts of a file, although the tier bypasses it.

It does when something else has read the file, such as the copy to the blob tier. cachestat(2), since Linux 6.5, tells
in about a microsecond; without it nothing counts as cached.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os

_CACHESTAT = 451  #: The number of the system call, the same on every architecture that Linux 6.5 runs on but for Alpha.


class _Range(ctypes.Structure):
    _fields_ = [("offset", ctypes.c_uint64), ("length", ctypes.c_uint64)]


class _Stat(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")]


_syscall = ctypes.CDLL(None, use_errno=True).syscall


def holds(fd: int, offset: int, length: int) -> bool:
    """Whether the page cache holds all of these bytes; they may be dropped at any time. False where the kernel or file
    system cannot tell."""
    pages = (offset + length - 1) // mmap.PAGESIZE - offset // mmap.PAGESIZE + 1
    stat = _Stat()
    failed = _syscall(_CACHESTAT, fd, ctypes.byref(_Range(offset, length)), ctypes.byref(stat), 0)
    return not failed and stat.cached >= pages


def turn_to(fd: int, offset: int, length: int) -> bool:
    """Make a descriptor opened with O_DIRECT read through the page cache from now on, if that holds all of these bytes.

    False, with nothing changed, if it does not or the descriptor already reads through it. Raises OSError.
    """
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if not flags & os.O_DIRECT or not holds(fd, offset, length):
        return False
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return True
