"""glibc's heap, told to give back what large buffers took. Left alone it learns to keep them: after a few bodies of 16 MiB a process holds
hundreds of MiB that nobody uses. Elsewhere than on glibc nothing happens."""

from __future__ import annotations

import contextlib
import ctypes

_M_MMAP_THRESHOLD = -3
#: Buffers from this size on are mapped on their own, and unmapped when they are freed.
_LARGE_BYTES = 1 << 20


def give_back_large_buffers() -> None:
    """From now on, for the whole process."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def give_back_free_memory() -> None:
    """What is free now goes back to the kernel: 5 ms when much is."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
