"""What a stack writes is for its own user alone: KV, sessions' names, logs, keys."""

from __future__ import annotations

import os


def keep_private() -> None:
    """From now on this process, and what it starts, makes files that no other user can read."""
    os.umask(0o077)
