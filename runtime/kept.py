"""Secrets created on first use and kept in a file that only its owner may read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path


def kept(path: Path, make: Callable[[], str]) -> str:
    """The stripped text in `path`; if the file is missing, it is created with the text from `make`. Concurrent
    processes get the same text. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        # Written under another name and linked, so that other processes never read a partial file.
        fresh = path.with_name(f"{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as f:
            f.write(make() + "\n")
        with contextlib.suppress(FileExistsError):
            os.link(fresh, path)
        fresh.unlink()
    return path.read_text().strip()
