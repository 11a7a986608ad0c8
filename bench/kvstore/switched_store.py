"""The store with a switch that turns off the verification of what the SSD gave, to see what that costs. For measuring only: turned off, it
serves whatever it read.

One process is measured both ways: two of them differ by more than verification costs, in where their files lie for one.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvstore.__main__ import main
from kvstore.core.events import Fault
from kvstore.tiers import ssd_reads
from kvstore.tiers.arena import Arena

#: Names the switch's file to the store.
FILE = "UPBEAT_BENCH_SWITCH"


class Switch:
    """One byte that two processes share: 1, and the store trusts the SSD."""

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
    switch, verify = Switch(Path(os.environ[FILE])), ssd_reads.verify

    def _perhaps(arena: Arena, fetches: Sequence[Any]) -> list[dict[int, Fault]]:
        return [{} for _ in fetches] if switch.trusts else verify(arena, fetches)

    ssd_reads.verify = _perhaps
    main()
