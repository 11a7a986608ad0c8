"""Counts reclaimable pages of cached blocks incrementally, so that no call walks the whole cache."""

from __future__ import annotations

from dataclasses import dataclass

from worker.core.block import Block, Reach


@dataclass(slots=True)
class PageCounts:
    """Pages by reach. Invariant: each is the sum over blocks of `Block.counted`."""

    later: int = 0
    now: int = 0
    hinted: int = 0

    def count(self, block: Block, reach: Reach, pages: int) -> None:
        """Count so many of the block's pages with this reach."""
        counted = (reach, pages) if reach else (Reach.NEVER, 0)
        if counted != block.counted:
            self.add(*block.counted, -1)
            self.add(*counted)
            block.counted = counted

    def add(self, reach: Reach, pages: int, sign: int = 1) -> None:
        """Add `sign * pages` to this reach."""
        if reach is Reach.LATER:
            self.later += sign * pages
        elif reach is Reach.NOW:
            self.now += sign * pages
        elif reach is Reach.HINTED:
            self.hinted += sign * pages
