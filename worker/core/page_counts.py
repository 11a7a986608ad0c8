"""How many pages of cached blocks could be had, kept up to date block by block: nobody walks a whole cache to know it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worker.core.hbm import Block


class Reach(IntEnum):
    """When a block's pages could be had."""

    NEVER = 0  # somebody uses it, or it is no cache entry
    LATER = 1  # nobody uses it; a transfer or its saving has to end
    NOW = 2  # it may be purged
    HINTED = 3  # the same, but a hint brought some of it and no request has used that


@dataclass(slots=True)
class PageCounts:
    """Pages by reach. Invariant: each block is counted as `block.counted` says, with so many pages."""

    later: int = 0
    now: int = 0
    hinted: int = 0

    def count(self, block: Block, reach: Reach) -> None:
        """The block is within this reach, with as many pages as it holds."""
        counted = (reach, block.held) if reach else (Reach.NEVER, 0)
        if counted != block.counted:
            self.add(*block.counted, -1)
            self.add(*counted)
            block.counted = counted

    def add(self, reach: Reach, pages: int, sign: int = 1) -> None:
        """So many pages more, or less, are within this reach."""
        if reach is Reach.LATER:
            self.later += sign * pages
        elif reach is Reach.NOW:
            self.now += sign * pages
        elif reach is Reach.HINTED:
            self.hinted += sign * pages
