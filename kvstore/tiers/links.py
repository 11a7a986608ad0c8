"""A file of the SSD tier as an object of a blob tier that is a directory of the same file system: another name, and nothing is copied
(docs/design/0001-kvstore.md)."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from pathlib import Path

_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


def link(source: Path, target: Path) -> bool:
    """Give the file a second name, in place of what has that name; it counts as written now. False: the file systems are two, or this one
    has no links. Raises OSError otherwise, as when the file is not there or the directory is full."""
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = target.with_name(f"{target.name}#{secrets.randbits(62)}")  # as obstore calls what is not whole yet: staged.py
    try:
        os.link(source, staged, follow_symlinks=False)
    except OSError as e:
        if e.errno in _NO_LINKS:
            return False
        raise
    try:
        os.utime(staged)
        staged.replace(target)
    finally:
        with contextlib.suppress(FileNotFoundError):  # it stays where it was if both were names of one file already
            staged.unlink()
    return True
