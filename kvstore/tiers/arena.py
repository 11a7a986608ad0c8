"""The node's DRAM tier: one file on a tmpfs, mapped shared by this process and by the node's workers.

It does not outlive the process: each start makes a file with a new name, and stop unlinks it. Files of killed stores
are removed at the next start; those of running stores are not touched (storelink/arena_sharing.py).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

import xxhash

from kvstore.tiers import checksums
from storelink import arena_sharing
from storelink.arena_file import HugePages, choose, free_bytes, map_file
from storelink.arena_sharing import MARK_BYTES, NONCE_BYTES, OWNER


class Arena:
    """view: the whole arena. address: of the mapping in this process. nonce: the mark at the file's end."""

    def __init__(self, stem: Path, size_bytes: int, hugepages: HugePages = "auto") -> None:
        """Make the file. stem: the beginning of its name. On a hugetlbfs the arena is whole pages, less the mark.

        Raises OSError when the file system cannot hold it, ConfigError when `kv.hugepages` cannot be satisfied.
        """
        stem.parent.mkdir(parents=True, exist_ok=True)
        arena_sharing.remove_dead(arena_sharing.arenas_of(stem))
        self.pages = choose(stem.parent, hugepages)
        file_bytes = arena_sharing.file_bytes(size_bytes, stem.parent)
        self.size_bytes = file_bytes - MARK_BYTES
        room = free_bytes(stem.parent)
        if room < file_bytes:
            # A tmpfs that fills up later kills the process that touches the next page.
            more = "raise vm.nr_hugepages" if self.pages.kind == "hugetlbfs" else "enlarge it (--shm-size)"
            raise OSError(
                f"the arena needs {file_bytes >> 20} MiB and {stem.parent} has {room >> 20}; lower kv.dram_gib or "
                f"{more}"
            )
        self.path, self.nonce, self._fd = _made(stem)
        try:
            os.ftruncate(self._fd, file_bytes)
            self._map = map_file(self._fd, file_bytes, hugepages)
        except OSError:
            self.close()
            raise
        arena_sharing.write_mark(self._map, self.size_bytes, self.nonce)
        self._attached = 0
        self.view = memoryview(self._map)[: self.size_bytes]
        checksums.prepare()
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def checksum(self, offset: int, length: int) -> int:
        """xxh3-64 of a range."""
        return xxhash.xxh3_64_intdigest(self.view[offset : offset + length])

    def checksums(self, ranges: Sequence[tuple[int, int]]) -> Sequence[int]:
        """xxh3-64 of each (offset, length); of many at a time, without the GIL where possible."""
        return checksums.sums(self.view, self.address, ranges)

    def attachment(self) -> int:
        """A new attachment's number."""
        self._attached += 1
        return self._attached

    def is_used_by(self, attachment: int) -> bool:
        """Whether this attachment's worker has the file mapped and may still copy from or to it."""
        return arena_sharing.is_locked(self._fd, attachment)

    def close(self) -> None:
        """Unlink the file. The mapping stays until the process ends, because transports may still use it."""
        self.path.unlink(missing_ok=True)
        os.close(self._fd)


def _made(stem: Path) -> tuple[Path, bytes, int]:
    """A new file owned by this process: (path, nonce, descriptor)."""
    while True:
        nonce = os.urandom(NONCE_BYTES)
        path = arena_sharing.path_of(stem, nonce)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        if arena_sharing.lock(fd, OWNER) and os.fstat(fd).st_nlink:
            return path, nonce, fd
        # Another store, cleaning up, removed it before we had locked it.
        os.close(fd)
