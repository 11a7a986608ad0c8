"""Removes files that killed processes left in a blob tier that is a directory: obstore, and links.py when it replaces a
file, write `NAME#1` and rename it when complete."""

from __future__ import annotations

import os
import re
from pathlib import Path

_STAGED = re.compile(r"#\d+$")
#: Longer than any write takes (blob.py bounds it), of this or another node: an older staged file is abandoned.
DEAD_S = 120.0


def remove_staged(root: Path, wall_s: float) -> int:
    """Remove staged files that no process writes any more. Returns their number. Blocking. wall_s: now, seconds since
    the epoch."""
    removed = 0
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            try:
                if _STAGED.search(name) and path.stat().st_mtime < wall_s - DEAD_S:
                    path.unlink()
                    removed += 1
            except OSError:
                continue
    return removed
