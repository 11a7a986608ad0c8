"""Whose an arena is: its name, the mark behind its bytes, and the locks by which the kernel knows who uses it.

A store makes a new file at every start, under a name that is never given twice, and writes a random mark behind the arena's bytes. A worker
is told both. It reads the mark through its own mapping, so what it copies from is the memory that the store verifies.

Locks are on single bytes of the file, by open file description (`F_OFD_SETLK`). Byte 0 is the store's while it lives; byte n is held by the
worker of attachment n from before it maps the file until it copies no more. A lock ends with its process, however that ends. tmpfs and
hugetlbfs have these locks, and containers that share the mount see each other's.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Iterable
from pathlib import Path

from storelink.arena_file import HugePages, map_file, offered, rounded

#: What follows the arena's bytes: the mark, and nothing else.
MARK_BYTES = 4096
NONCE_BYTES = 16
#: The byte that the store holds. Attachments are numbered from 1.
OWNER = 0
_MARK = struct.Struct("<8s16sQ")
_MAGIC = b"UPBTARN1"
#: struct flock of 64-bit Linux.
_FLOCK = struct.Struct("@hhqqi4x")
_SUFFIX = ".arena"


def path_of(stem: Path, nonce: bytes) -> Path:
    """The file of the store that drew `nonce`. `stem`: what the names of a node's arenas begin with (`NodePlaces.arena_stem`)."""
    return stem.with_name(f"{stem.name}.{nonce.hex()}{_SUFFIX}")


def arenas_of(stem: Path) -> list[Path]:
    """The node's arenas that are there, of whatever store."""
    return sorted(stem.parent.glob(f"{stem.name}.*{_SUFFIX}"))


def remove_dead(paths: Iterable[Path]) -> list[Path]:
    """Unlink the arenas whose store is gone; which ones. Workers that still map one keep their memory."""
    removed = []
    for path in paths:
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            if lock(fd, OWNER):
                path.unlink(missing_ok=True)
                removed.append(path)
        finally:
            os.close(fd)
    return removed


def file_bytes(size_bytes: int, directory: Path) -> int:
    """Bytes of the file of an arena of `size_bytes`: the mark comes on top, on a hugetlbfs out of the last page."""
    whole = rounded(size_bytes, directory)
    return whole if offered(directory).kind == "hugetlbfs" else whole + MARK_BYTES


def write_mark(mapped: mmap.mmap, arena_bytes: int, nonce: bytes) -> None:
    """Say which arena this is. `mapped` has MARK_BYTES beyond the arena's."""
    _MARK.pack_into(mapped, arena_bytes, _MAGIC, nonce, arena_bytes)


def lock(fd: int, byte: int) -> bool:
    """Take the lock on this byte for as long as `fd` is open; false when somebody has it."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    except OSError as e:
        if e.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def unlock(fd: int) -> None:
    """Give back every lock that was taken by `fd`, and by copies of it."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0))


def is_locked(fd: int, byte: int) -> bool:
    """Whether another description than `fd`'s has the lock on this byte."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


class SharedArena:
    """A worker's mapping of its store's arena. `mapped`: the arena, and MARK_BYTES more. Until `leave`, the store gives away nothing that
    this worker may still read or write."""

    def __init__(self, path: Path, arena_bytes: int, nonce: bytes, attachment: int, hugepages: HugePages) -> None:
        """Raises OSError when the file is not there, is not the one that the store means, or the attachment is another's."""
        self._fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            if attachment <= OWNER or not lock(self._fd, attachment):
                raise OSError(errno.EBUSY, f"attachment {attachment} of {path} is in use")
            self.mapped = map_file(self._fd, arena_bytes + MARK_BYTES, hugepages)
            if _MARK.unpack_from(self.mapped, arena_bytes) != (_MAGIC, nonce, arena_bytes):
                raise OSError(errno.ESTALE, f"{path} is not the arena of the store that was asked")
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Nothing is copied from or to it any more. The mapping goes with whoever holds it."""
        unlock(self._fd)  # the mapping has a copy of the descriptor
        os.close(self._fd)
