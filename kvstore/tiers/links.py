"""A file of the SSD tier as an object of a blob tier that is a directory of the same file system: another name, and nothing is copied
(docs/design/0001-kvstore.md)."""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path

_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


def link(source: Path, target: Path) -> bool:
    """Give the file a second name, in place of what has that name; it counts as written now, under both. False: the file systems are two,
    or this one has no links. Raises OSError otherwise, as when the file is not there or the directory is full."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        try:
            os.link(source, target, follow_symlinks=False)  # nothing is left half done by whoever kills us here
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
    staged = target.with_name(f"{target.name}#{secrets.randbits(62)}")  # as obstore calls what is not whole yet: staged.py
    try:
        os.link(source, staged, follow_symlinks=False)
        staged.replace(target)
    finally:
        staged.unlink(missing_ok=True)  # it stays where it was if both became names of one file meanwhile
