"""A chunk in HBM: its pages, users and save state."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from contracts.ids import SessionKey
from worker.core.pages import Pages

#: In `Block.pages`: no page for this layer.
NO_PAGE = -1


class Reach(IntEnum):
    """When a block's pages can be reclaimed."""

    NEVER = 0  # in use (and not `outside`), or not in the index
    LATER = 1  # a transfer or its save is under way, and nothing else keeps it
    NOW = 2  # purgeable
    HINTED = 3  # purgeable, but holds unused pages of a hint (`HbmCache.hold_hinted`)


class SaveState(IntEnum):
    """Progress of a block's copy to the store."""

    NONE = 0  # the chunk is not full, or caching is off
    WAITING = 1  # offered to the store, or being copied
    BELOW = 2  # stored in a lower tier
    REFUSED = 3  # the store could not take it; evicted first, recomputed on demand


@dataclass(slots=True, eq=False)
class Block:
    """One chunk in HBM.

    pages: `[layers]` page ids or NO_PAGE. ready: `[layers]`, the page is known to be filled. users: number of sequences
    that use it; passed: of these, those that have passed it (`worker.core.windowed`). moving: transfers under way, in
    either direction. sessions: sessions whose cache contains it, latest last. hinted: `[layers]`, the page was taken
    for a hint and no request has used it yet.
    """

    index: int
    pages: Pages
    ready: npt.NDArray[np.bool_]
    hinted: npt.NDArray[np.bool_]
    sessions: dict[SessionKey, None] = field(default_factory=dict)
    key: bytes | None = None
    users: int = 0
    passed: int = 0
    moving: int = 0
    lost: bool = False
    save: SaveState = SaveState.NONE
    #: Number of layers that have a page.
    held: int = 0
    #: Its entry in `PageCounts`: reach and number of pages.
    counted: tuple[Reach, int] = (Reach.NEVER, 0)

    @property
    def complete(self) -> bool:
        """Every layer is ready."""
        return bool(self.ready.all())

    @property
    def purgeable(self) -> bool:
        """Whether it may lose pages now."""
        return not self.users and not self.moving and (self.save is SaveState.BELOW or self.save is SaveState.REFUSED)

    @property
    def outside(self) -> bool:
        """In use, but all of its users have passed it, and a lower tier has it: its pages of layers with a window may
        leave once no transfer is under way."""
        return 0 < self.users == self.passed and (self.save is SaveState.BELOW or self.save is SaveState.WAITING)

    @property
    def bound(self) -> int:
        """Pages that cannot be reclaimed before its users leave."""
        return self.held - self.counted[1]

    @property
    def unsaved(self) -> bool:
        """The store refused it."""
        return self.save is SaveState.REFUSED
