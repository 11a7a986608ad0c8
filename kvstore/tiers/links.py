"""Hard links: a file of the SSD tier becomes an object of a blob tier on the same file system without a copy
(docs/design/0001-kvstore.md)."""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path

_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


def link(source: Path, target: Path) -> bool:
    """Link the file to a second name, replacing an existing file, and update its time. False when the file systems
    differ or have no links. Raises OSError otherwise, as when the file is missing or the directory is full."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        try:
            os.link(source, target, follow_symlinks=False)  # atomic
        except FileExistsError:
            _replace(source, target)
    except OSError as e:
        if e.errno in _NO_LINKS:
            return False
        raise
    os.utime(target, follow_symlinks=False)
    return True


def _replace(source: Path, target: Path) -> None:
    if target.samefile(source):
        return
    # the name obstore uses for incomplete files: staged.py
    staged = target.with_name(f"{target.name}#{secrets.randbits(62)}")
    try:
        os.link(source, staged, follow_symlinks=False)
        staged.replace(target)
    finally:
        staged.unlink(missing_ok=True)  # rename does nothing if both names are of one file
