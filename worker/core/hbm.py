"""What is in HBM, and what leaves it first.

A block is one chunk's pages, one a layer (or none, for a layer that has left or has not come). Sequences use blocks; a
block nobody uses whose bytes a lower tier has is *cached*: usable, and free to be purged at any moment without a
transfer (SYMPHONY, section 3.4, cooperative memory).

Invariants (`validate`):
- A keyed block in the index has that key; two blocks never share a page.
- A block in use, with a transfer under way, or waiting to be saved is never purged.
- `ready[l]` is only true where `pages[l]` is a page.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from contracts.ids import SessionKey
from worker.core.pages import PagePool, Pages

NO_PAGE = -1


class Save(IntEnum):
    """How far a block's way down is."""

    NONE = 0  # its chunk is not full, or caching is off
    WAITING = 1  # to be offered to the store, or the copy is under way
    BELOW = 2  # a lower tier has it
    REFUSED = 3  # nobody below could take it; dropped first, recomputed when wanted


class Rank(IntEnum):
    """Victim classes of DESIGN section 6, first victims first."""

    LOST_CAUSE = 0  # not saved below: nothing to preserve by waiting
    WITHDRAWN = 1  # its advisory was invalidated or has expired
    UNADVISED = 2
    ADVISED = 3


@dataclass(slots=True, eq=False)
class Block:
    """One chunk in HBM.

    pages: `[layers]` page ids or NO_PAGE. ready: `[layers]`, the page holds the right bytes (set by the loader's thread).
    users: sequences that need it. moving: pieces whose transfer is under way in either direction.
    """

    index: int
    pages: Pages
    ready: npt.NDArray[np.bool_]
    key: bytes | None = None
    session: SessionKey | None = None
    users: int = 0
    moving: int = 0
    lost: bool = False
    save: Save = Save.NONE
    last_use_s: float = 0.0

    @property
    def complete(self) -> bool:
        """Every layer is here."""
        return bool(self.ready.all())

    @property
    def purgeable(self) -> bool:
        """May lose pages now."""
        return not self.users and not self.moving and self.save in (Save.BELOW, Save.REFUSED)


@dataclass(slots=True)
class Standing:
    """A session's rank: what an advisory gave it, until `expires_s`."""

    priority: int = 0
    advised_until_s: float = 0.0
    withdrawn: bool = False


@dataclass(slots=True)
class HbmCache:
    """The blocks of one model, over one PagePool. `layer_priority` off purges whole chunks."""

    pool: PagePool
    layer_priority: bool = True
    index: dict[bytes, Block] = field(default_factory=dict)
    standings: dict[SessionKey, Standing] = field(default_factory=dict)
    #: Pages purged, by rank name: for metrics.
    purged: dict[str, int] = field(default_factory=dict)

    # ---- blocks ------------------------------------------------------------------------------------------------
    def new_block(self, index: int, session: SessionKey, layers: Iterable[int], now: float) -> Block:
        """A block with pages for `layers`, used by nobody yet. The caller has made room: raises MemoryError otherwise."""
        count = self.pool.layers
        block = Block(index, np.full(count, NO_PAGE, np.int64), np.zeros(count, bool), session=session, last_use_s=now)
        self.fill(block, layers)
        return block

    def fill(self, block: Block, layers: Iterable[int]) -> None:
        """Give the block pages for `layers` it has none for."""
        for layer in layers:
            assert block.pages[layer] == NO_PAGE
            block.pages[layer] = self.pool.take(layer)

    def enter(self, block: Block, key: bytes) -> bool:
        """Put the block into the index under `key`. False when a better one is there already: this one stays private."""
        other = self.index.get(key)
        if other is not None and other is not block:
            if other.complete or other.users or other.moving or other.save == Save.WAITING:
                return False
            self._drop(other)
        block.key = key
        self.index[key] = block
        return True

    def use(self, block: Block, now: float) -> None:
        """A sequence needs the block from now on."""
        block.users += 1
        block.last_use_s = now

    def release(self, block: Block, now: float) -> None:
        """A sequence needs it no more. A block that is nobody's and of no further use gives its pages back."""
        block.users -= 1
        block.last_use_s = now
        self.settle(block)

    def settle(self, block: Block) -> None:
        """Free the block if nothing holds it and it is no cache entry (private, lost, or without a page)."""
        if block.users or block.moving or block.save == Save.WAITING:
            return
        if block.key is None or block.lost or not (block.pages != NO_PAGE).any():
            self._drop(block)
        elif not block.ready.all():
            # A load that was cut short leaves pages that were never filled.
            self._strip(block, [int(layer) for layer in np.flatnonzero((block.pages != NO_PAGE) & ~block.ready)])
            if not block.ready.any():
                self._drop(block)

    def lose(self, block: Block) -> None:
        """A piece of it could not be had: nobody may match it again."""
        block.lost = True
        if block.key is not None and self.index.get(block.key) is block:
            del self.index[block.key]
        self.settle(block)

    def erase(self, key: bytes) -> None:
        """Its session was erased: forget it, now or as soon as it is not in use."""
        block = self.index.get(key)
        if block is not None:
            if block.save == Save.WAITING:
                block.save = Save.REFUSED
            self.lose(block)

    def _strip(self, block: Block, layers: list[int]) -> None:
        taken = [layer for layer in layers if block.pages[layer] != NO_PAGE]
        self.pool.give([int(block.pages[layer]) for layer in taken])
        block.pages[taken] = NO_PAGE
        block.ready[taken] = False

    def _drop(self, block: Block) -> None:
        self._strip(block, list(range(self.pool.layers)))
        if block.key is not None and self.index.get(block.key) is block:
            del self.index[block.key]
        block.lost = True

    # ---- room --------------------------------------------------------------------------------------------------
    def rank(self, session: SessionKey | None, now: float) -> tuple[int, int]:
        """(class, -priority): smaller leaves first."""
        standing = self.standings.get(session) if session is not None else None
        if standing is None:
            return Rank.UNADVISED, 0
        if standing.withdrawn or 0 < standing.advised_until_s <= now:
            return Rank.WITHDRAWN, -standing.priority
        return (Rank.ADVISED if standing.advised_until_s else Rank.UNADVISED), -standing.priority

    def _victim_rank(self, block: Block, now: float) -> tuple[int, int]:
        return (Rank.LOST_CAUSE, 0) if block.save == Save.REFUSED else self.rank(block.session, now)

    def make_room(self, pages: int, now: float, below: tuple[int, int, int] | None = None) -> bool:
        """Purge until `pages` pages are free. Changes nothing and returns False when that is impossible.

        below: only victims that rank under this (class, -priority, -layer) may go: what a prefetch is allowed.
        Order (DESIGN section 6): class, least urgent priority, highest layer, least recently used, latest chunk.
        """
        short = pages - self.pool.free
        if short <= 0:
            return True
        victims: list[tuple[tuple[int, int, int, float, int, int], int, Block, int]] = []
        for block in self.index.values():
            if not block.purgeable:
                continue
            rank = self._victim_rank(block, now)
            for layer in map(int, np.flatnonzero(block.pages != NO_PAGE)):
                if below is not None and (*rank, -layer) >= below:
                    continue
                depth = -layer if self.layer_priority else 0
                order = (*rank, depth, block.last_use_s, -block.index, -layer)
                victims.append((order, id(block), block, layer))
        if len(victims) < short:
            return False
        # A few more than asked for, so that the next caller need not search again.
        spare = 0 if below is not None else min(len(victims), self.pool.total // 64)
        for victim_order, _, block, layer in heapq.nsmallest(max(short, spare), victims):
            name = Rank(victim_order[0]).name.lower()
            self.purged[name] = self.purged.get(name, 0) + 1
            self._strip(block, [layer])
            if not block.ready.any():
                self._drop(block)
        return True

    def available(self) -> int:
        """Pages that are free or could be made so at once."""
        return self.pool.free + sum(int((b.pages != NO_PAGE).sum()) for b in self.index.values() if b.purgeable)

    def validate(self, in_use: Iterable[Block] = ()) -> None:
        """Raise AssertionError when an invariant does not hold. `in_use`: private blocks of sequences."""
        self.pool.validate()
        blocks = {id(b): b for b in [*self.index.values(), *in_use]}.values()
        pages = [int(p) for b in blocks for p in b.pages if p != NO_PAGE]
        assert len(pages) == len(set(pages)), "two blocks share a page"
        assert self.pool.total - self.pool.free == len(pages), "a taken page belongs to no block"
        for key, block in self.index.items():
            assert block.key == key and not block.lost
        for block in blocks:
            assert not (block.ready & (block.pages == NO_PAGE)).any()
            assert block.users >= 0 and block.moving >= 0
