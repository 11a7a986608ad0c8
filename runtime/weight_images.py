"""Files of weights in host memory that the workers of a machine share: their locks, and who removes them.

Every file has this prefix: an image, one that is being written, and the empty lock file beside it. A process that uses
one holds a lock on it (`flock`), which ends with the process. Whoever may remove a file has its exclusive lock and
unlinks it before the lock goes; so a lock counts only if the locked file still has its path (`_is_at`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

PREFIX, SUFFIX = "upbeat-weights-", ".image"
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


def opened(path: Path, *, make: bool = False) -> int:
    """A descriptor of the file with a shared lock. make: the file is made, or emptied. Raises OSError."""
    return _locked(path, fcntl.LOCK_SH, os.O_CREAT | os.O_TRUNC if make else 0)


@contextlib.contextmanager
def only(path: Path) -> Iterator[None]:
    """One process at a time is within it for this image. Raises OSError."""
    path = path.with_suffix(".lock")
    fd = _locked(path, fcntl.LOCK_EX, os.O_CREAT)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(fd)


def remove_if_unused(path: Path, fd: int) -> None:
    """Unlink the open file, which had this path, unless somebody else uses it or the path is another file's. Gives up
    its shared lock."""
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(path, fd):
            path.unlink()


def remove_unused(directory: Path) -> None:
    """Remove files that nobody uses: of workers that were killed. Any process of the same user."""
    for path in directory.glob(f"{PREFIX}*"):
        try:
            fd = os.open(path, _FLAGS)
        except OSError:
            continue
        remove_if_unused(path, fd)
        os.close(fd)


def _locked(path: Path, kind: int, more: int) -> int:
    while True:
        fd = os.open(path, _FLAGS | more, 0o600)
        try:
            fcntl.flock(fd, kind)
            if _is_at(path, fd):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # it was removed before it was locked


def _is_at(path: Path, fd: int) -> bool:
    own = os.fstat(fd)
    try:
        there = path.lstat()
    except FileNotFoundError:
        return False
    return (own.st_dev, own.st_ino) == (there.st_dev, there.st_ino)
