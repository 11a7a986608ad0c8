"""The node's DRAM tier: one file on a tmpfs, mapped shared by this process and by the node's workers.

Nothing in it outlives the process: it is made anew at start and unlinked at stop.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import xxhash


class Arena:
    """`view` is the whole arena, `address` where it lies in this process. Offsets are the ledger's."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        """Make the file. Raises OSError when the tmpfs cannot hold it."""
        self.path = path
        self.size_bytes = size_bytes
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        free = os.statvfs(path.parent)
        if free.f_bavail * free.f_frsize < size_bytes:
            # A tmpfs that fills up later kills whoever touches the next page.
            room = free.f_bavail * free.f_frsize >> 20
            raise OSError(
                f"the arena needs {size_bytes >> 20} MiB and {path.parent} has {room}; lower kv.dram_gib or enlarge it (--shm-size)"
            )
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(fd, size_bytes)
            self._map = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED)
        finally:
            os.close(fd)
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def checksum(self, offset: int, length: int) -> int:
        """xxh3-64 of a range."""
        return xxhash.xxh3_64_intdigest(self.view[offset : offset + length])

    def close(self) -> None:
        """Unlink the file; the mapping goes with the process, as transports may still refer to it."""
        self.path.unlink(missing_ok=True)
