"""Makes files durable, and classifies errors of writes."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from kvstore.core.events import Wrote

_OUTCOMES = {
    errno.ENOSPC: Wrote.FULL,
    errno.EDQUOT: Wrote.FULL,
    errno.EROFS: Wrote.READ_ONLY,
    errno.EACCES: Wrote.READ_ONLY,
    errno.EPERM: Wrote.READ_ONLY,
    errno.EIO: Wrote.BROKEN,
    errno.ENODEV: Wrote.BROKEN,
    errno.ENXIO: Wrote.BROKEN,
    errno.ENOTDIR: Wrote.BROKEN,
    errno.ESTALE: Wrote.BROKEN,
}


def write_outcome(error: OSError) -> Wrote:
    """What an error of a write means for the next write."""
    return _OUTCOMES.get(error.errno or 0, Wrote.FAILED)


def sync_file(fd: int) -> OSError | None:
    """Make the file's bytes durable. Returns the error, if any."""
    try:
        os.fdatasync(fd)
    except OSError as e:
        return e
    return None


def sync_folder(folder: Path) -> None:
    """Make the folder's entries durable. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
