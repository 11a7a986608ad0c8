"""The node's DRAM tier: one file on a tmpfs, mapped shared by this process and by the node's workers.

Nothing in it outlives the process: it is made anew at start and unlinked at stop.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

import xxhash

from kvstore.tiers import checksums
from runtime.arena_file import HugePages, choose, free_bytes, map_file, rounded


class Arena:
    """`view` is the whole arena, `address` where it lies in this process. Offsets are the ledger's."""

    def __init__(self, path: Path, size_bytes: int, hugepages: HugePages = "auto") -> None:
        """Make the file, of `size_bytes` rounded up to whole pages of a hugetlbfs. Raises OSError when its file system cannot
        hold it, ConfigError when `kv.hugepages` cannot be had."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        self.pages = choose(path.parent, hugepages)
        self.size_bytes = size_bytes = rounded(size_bytes, path.parent)
        room = free_bytes(path.parent)
        if room < size_bytes:
            # A tmpfs that fills up later kills whoever touches the next page.
            more = "raise vm.nr_hugepages" if self.pages.kind == "hugetlbfs" else "enlarge it (--shm-size)"
            raise OSError(f"the arena needs {size_bytes >> 20} MiB and {path.parent} has {room >> 20}; lower kv.dram_gib or {more}")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(fd, size_bytes)
            self._map = map_file(path, size_bytes, hugepages)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(fd)
        self.view = memoryview(self._map)
        checksums.prepare()
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def checksum(self, offset: int, length: int) -> int:
        """xxh3-64 of a range."""
        return xxhash.xxh3_64_intdigest(self.view[offset : offset + length])

    def checksums(self, ranges: Sequence[tuple[int, int]]) -> Sequence[int]:
        """xxh3-64 of each (offset, length); of many at a time without the GIL where that can be had."""
        return checksums.sums(self.view, self.address, ranges)

    def close(self) -> None:
        """Unlink the file; the mapping goes with the process, as transports may still refer to it."""
        self.path.unlink(missing_ok=True)
