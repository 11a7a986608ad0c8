"""Who owns and who uses an arena: its unique name, the mark behind its bytes, and file locks.

A store creates a new file at every start, under a unique name, and writes a random mark behind the arena's bytes. It
tells a worker both. The worker reads the mark through its own mapping, which proves that it maps the store's memory.

Locks are on single bytes of the file, by open file description (`F_OFD_SETLK`). The store holds byte 0 while it runs.
The worker of attachment n holds byte n from before it maps the file until its last copy. The kernel releases a lock
when its process ends in any way. tmpfs and hugetlbfs support these locks, also between containers that share the mount.
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

#: Size of the mark behind the arena's bytes.
MARK_BYTES = 4096
NONCE_BYTES = 16
#: The byte that the store locks. Attachments are numbered from 1.
OWNER = 0
_MARK = struct.Struct("<8s16sQ")
_MAGIC = b"UPBTARN1"
#: struct flock of 64-bit Linux.
_FLOCK = struct.Struct("@hhqqi4x")
_SUFFIX = ".arena"


def path_of(stem: Path, nonce: bytes) -> Path:
    """The arena file of the store that drew `nonce`. `stem`: common prefix of a node's arenas
    (`NodePlaces.arena_stem`)."""
    return stem.with_name(f"{stem.name}.{nonce.hex()}{_SUFFIX}")


def arenas_of(stem: Path) -> list[Path]:
    """All existing arena files of the node, of any store."""
    return sorted(stem.parent.glob(f"{stem.name}.*{_SUFFIX}"))


def remove_dead(paths: Iterable[Path]) -> list[Path]:
    """Unlinks arenas whose store has ended, and returns their paths. Workers that still map one keep their memory."""
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
    """File size of an arena of `size_bytes`. The mark is added, except on a hugetlbfs, where it is in the last page."""
    whole = rounded(size_bytes, directory)
    return whole if offered(directory).kind == "hugetlbfs" else whole + MARK_BYTES


def write_mark(mapped: mmap.mmap, arena_bytes: int, nonce: bytes) -> None:
    """Writes the arena's mark. `mapped` has MARK_BYTES behind the arena."""
    _MARK.pack_into(mapped, arena_bytes, _MAGIC, nonce, arena_bytes)


def lock(fd: int, byte: int) -> bool:
    """Locks this byte for as long as `fd` is open; false when another file description holds it."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    except OSError as e:
        if e.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def unlock(fd: int) -> None:
    """Releases every lock taken through `fd` or its duplicates."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0))


def is_locked(fd: int, byte: int) -> bool:
    """Whether another file description than `fd`'s holds the lock on this byte."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


class SharedArena:
    """A worker's mapping of its store's arena. `mapped`: the arena plus MARK_BYTES. Until `leave`, the store reuses
    nothing that this worker may still read or write."""

    def __init__(self, path: Path, arena_bytes: int, nonce: bytes, attachment: int, hugepages: HugePages) -> None:
        """Raises OSError when the file is missing, has another mark, or the attachment is in use."""
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

    @property
    def file(self) -> int:
        """Its descriptor: a process that is given it keeps the lock."""
        return self._fd

    def leave(self) -> None:
        """Call after the last copy. The mapping itself lives as long as it is referenced."""
        unlock(self._fd)  # the mapping has a copy of the descriptor
        os.close(self._fd)
