"""What a killed process leaves in a blob tier that is a directory: obstore writes `NAME#1` and renames it when it is whole, and so does
links.py where it takes another file's place."""

from __future__ import annotations

import os
import re
from pathlib import Path

_STAGED = re.compile(r"#\d+$")
#: A write takes less (blob.py bounds it), so that whatever was not touched for this long belongs to nobody. Other nodes write here too.
DEAD_S = 120.0


def remove_staged(root: Path, wall_s: float) -> int:
    """Remove staged files that nobody writes any more; how many. Blocking. wall_s: now, seconds since the epoch."""
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
