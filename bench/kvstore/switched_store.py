"""A store with a switch that turns off verification of SSD reads. For measuring only.

One process is measured both ways, because two processes differ by more than verification costs, for instance in where
their files lie.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

from kvstore.__main__ import main
from kvstore.core.events import Fault
from kvstore.tiers import ssd_reads
from kvstore.tiers.arena import Arena

#: Environment variable with the path of the switch's file.
FILE = "UPBEAT_BENCH_SWITCH"


class Switch:
    """One byte shared by two processes. 1: the store skips verification."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_bytes(bytes(mmap.PAGESIZE))
        with path.open("r+b") as file:
            self._byte = mmap.mmap(file.fileno(), mmap.PAGESIZE)

    @property
    def trusts(self) -> bool:
        return bool(self._byte[0])

    @trusts.setter
    def trusts(self, on: bool) -> None:
        self._byte[0] = on


if __name__ == "__main__":
    switch, verify = Switch(Path(os.environ[FILE])), ssd_reads.verify_stored

    def _perhaps(arena: Arena, *of_read: Any) -> dict[int, Fault]:
        return {} if switch.trusts else verify(arena, *of_read)

    ssd_reads.verify_stored = _perhaps
    main()
