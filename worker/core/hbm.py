"""What is in HBM, and what leaves it first.

A block is one chunk's pages, one a layer (or none, for a layer that has left or has not come). Sequences use blocks; a
block nobody uses whose bytes a lower tier has is *cached*: usable, and free to be purged at any moment without a
transfer (SYMPHONY, section 3.4, cooperative memory).

Invariants (`validate`):
- A keyed block in the index has that key; two blocks never share a page.
- A block in use, with a transfer under way, or waiting to be saved is never purged.
- `ready[l]` and `hinted[l]` are only true where `pages[l]` is a page.
- What could be had is counted (`worker.core.page_counts`). So `users`, `moving`, `save` and `hinted` of a block change here only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from contracts.ids import SessionKey
from worker.core.page_counts import PageCounts, Reach
from worker.core.pages import PagePool, Pages
from worker.core.standings import Rank, Standings
from worker.core.victims import Limit, Victims, victims, within_parts

NO_PAGE = -1
#: Room is made for so many like the one that asks, so that the next ones need not search, and no step waits for more than that.
_SPARE_TIMES = 16
#: Sessions that a block remembers to be wanted by; of more, those that came first are forgotten.
MOST_OWNERS = 32
#: Tenants whose weights are remembered.
MOST_WEIGHTS = 10_000


class Save(IntEnum):
    """How far a block's way down is."""

    NONE = 0  # its chunk is not full, or caching is off
    WAITING = 1  # to be offered to the store, or the copy is under way
    BELOW = 2  # a lower tier has it
    REFUSED = 3  # nobody below could take it; dropped first, recomputed when wanted


@dataclass(slots=True, eq=False)
class Block:
    """One chunk in HBM.

    pages: `[layers]` page ids or NO_PAGE. ready: `[layers]`, the page holds the right bytes, as far as the core was told.
    users: sequences that need it. moving: transfers under way in either direction. sessions: whose cache it is part of, the
    latest last. hinted: `[layers]`, the page was taken for a hint, and no request has used it yet.
    """

    index: int
    pages: Pages
    ready: npt.NDArray[np.bool_]
    hinted: npt.NDArray[np.bool_]
    sessions: dict[SessionKey, None] = field(default_factory=dict)
    key: bytes | None = None
    users: int = 0
    moving: int = 0
    lost: bool = False
    save: Save = Save.NONE
    #: How many layers have a page.
    held: int = 0
    #: As what it was counted last, with how many pages.
    counted: tuple[Reach, int] = (Reach.NEVER, 0)

    @property
    def complete(self) -> bool:
        """Every layer is here."""
        return bool(self.ready.all())

    @property
    def purgeable(self) -> bool:
        """May lose pages now."""
        return not self.users and not self.moving and (self.save is Save.BELOW or self.save is Save.REFUSED)

    @property
    def unsaved(self) -> bool:
        """Nobody below could take it."""
        return self.save is Save.REFUSED


@dataclass(slots=True)
class HbmCache:
    """The blocks of one model, over one PagePool. `layer_priority` off purges whole chunks.

    hold_hinted: nothing that was brought for a live hint is purged before a request has used it; the opposite of cooperative memory.
    """

    pool: PagePool
    layer_priority: bool = True
    hold_hinted: bool = False
    index: dict[bytes, Block] = field(default_factory=dict)
    standings: Standings = field(default_factory=Standings)
    #: Pages purged to make room, by the victim's class.
    purged: Counter[Rank] = field(default_factory=Counter)
    #: Pages filled for a hint that a request used in place, and those that left before any did.
    hints_used: int = 0
    hints_wasted: int = 0
    #: Pages that requests found here, ready.
    hits: int = 0
    #: Of the tenants that asked for something here; of others it is 1.
    weights: dict[str, float] = field(default_factory=dict)
    _counts: PageCounts = field(default_factory=PageCounts)

    # ---- blocks ------------------------------------------------------------------------------------------------
    def new_block(self, index: int, session: SessionKey, layers: Iterable[int]) -> Block:
        """A block with pages for `layers`, used by nobody yet. The caller has made room: raises MemoryError otherwise."""
        count = self.pool.layers
        block = Block(index, np.full(count, NO_PAGE, np.int64), np.zeros(count, bool), np.zeros(count, bool), {session: None})
        self.fill(block, layers)
        return block

    def fill(self, block: Block, layers: Iterable[int]) -> None:
        """Give the block pages for `layers` it has none for."""
        for layer in layers:
            assert block.pages[layer] == NO_PAGE
            block.pages[layer] = self.pool.take(layer)
            block.held += 1
        self._count(block)

    def enter(self, block: Block, key: bytes) -> bool:
        """Put the block into the index under `key`. False when a better one is there already: this one stays private."""
        other = self.index.get(key)
        if other is not None and other is not block:
            if other.complete or other.users or other.moving or other.save == Save.WAITING:
                return False
            self._drop(other)
        block.key = key
        self.index[key] = block
        self._count(block)
        return True

    def want(self, block: Block, session: SessionKey) -> None:
        """The block is part of this session's cache too."""
        block.sessions.pop(session, None)
        block.sessions[session] = None
        if len(block.sessions) > MOST_OWNERS:
            del block.sessions[next(iter(block.sessions))]

    def use(self, block: Block) -> None:
        """A sequence needs the block from now on."""
        block.users += 1
        self._count(block)

    def pin(self, block: Block) -> None:
        """A transfer into it or out of it begins."""
        block.moving += 1
        self._count(block)

    def unpin(self, block: Block) -> None:
        """A transfer has ended; the caller says what becomes of the block (`settle`, `give_up`, `lose`)."""
        block.moving -= 1
        self._count(block)

    def mark(self, block: Block, save: Save) -> None:
        """So far the block's way down is."""
        block.save = save
        self._count(block)

    def hint(self, block: Block, layers: list[int]) -> None:
        """The pages of these layers were taken for a hint."""
        block.hinted[layers] = True
        self._count(block)

    def claim(self, blocks: list[Block]) -> None:
        """A request found the blocks here and will use them: what was fetched for a hint has been of use."""
        if not blocks:
            return
        ready = np.array([block.ready for block in blocks])
        self.hits += int(ready.sum())
        hinted = np.array([block.hinted for block in blocks])
        self.hints_used += int((hinted & ready).sum())
        for i in np.flatnonzero(hinted.any(axis=1)).tolist():
            blocks[i].hinted[:] = False
            self._count(blocks[i])

    @staticmethod
    def gaps(blocks: list[Block]) -> list[list[int]]:
        """The layers of each block that have no page."""
        if not blocks:
            return []
        missing = np.array([block.pages for block in blocks]) == NO_PAGE
        return [np.flatnonzero(row).tolist() if some else [] for row, some in zip(missing, missing.any(axis=1), strict=True)]

    def release(self, block: Block) -> None:
        """A sequence needs it no more. A block that is nobody's and of no further use gives its pages back."""
        block.users -= 1
        self._count(block)
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

    def give_up(self, block: Block, layers: list[int]) -> None:
        """Those of `layers` that have not come will not: their pages are free. What is there stays, if it is of further use."""
        self._strip(block, [layer for layer in layers if not block.ready[layer]])
        self.settle(block)

    def lose(self, block: Block) -> None:
        """A piece of it could not be had: nobody may match it again."""
        self._unlist(block)
        self.settle(block)

    def erase(self, key: bytes) -> None:
        """It was erased: forget it, now or as soon as it is not in use."""
        block = self.index.get(key)
        if block is not None:
            if block.save == Save.WAITING:
                self.mark(block, Save.REFUSED)
            self.lose(block)

    def forget(self, sessions: Set[SessionKey]) -> None:
        """The sessions were erased: as `erase`, for what is nobody else's cache, saved or not."""
        for key, block in list(self.index.items()):
            if not sessions.isdisjoint(block.sessions):
                if block.sessions.keys() <= sessions:
                    self.erase(key)
                else:
                    block.sessions = {session: None for session in block.sessions if session not in sessions}

    def _strip(self, block: Block, layers: list[int]) -> None:
        taken = [layer for layer in layers if block.pages[layer] != NO_PAGE]
        self.pool.give([int(block.pages[layer]) for layer in taken])
        self.hints_wasted += int((block.hinted & block.ready)[taken].sum())
        block.pages[taken] = NO_PAGE
        block.held -= len(taken)
        block.ready[taken] = block.hinted[taken] = False
        self._count(block)

    def _drop(self, block: Block) -> None:
        self._strip(block, list(range(self.pool.layers)))
        self._unlist(block)

    def _unlist(self, block: Block) -> None:
        """Nobody may match it any more."""
        block.lost = True
        if block.key is not None and self.index.get(block.key) is block:
            del self.index[block.key]
        self._count(block)

    # ---- counts ------------------------------------------------------------------------------------------------
    def _count(self, block: Block) -> None:
        self._counts.count(block, self._reach(block))

    def _reach(self, block: Block) -> Reach:
        if block.users or block.key is None or block.lost:
            return Reach.NEVER
        if block.moving or block.save is Save.WAITING:
            return Reach.LATER
        if not block.purgeable:
            return Reach.NEVER
        return Reach.HINTED if self.hold_hinted and block.hinted.any() else Reach.NOW

    # ---- room --------------------------------------------------------------------------------------------------
    def make_room(self, pages: int, now: float, below: Limit | None = None, tenant: str | None = None) -> bool:
        """Purge until `pages` pages are free. Changes nothing and returns False when that is impossible.

        below: only victims that rank under this (class, -priority, -layer) may go: what a prefetch is allowed. tenant: whose prefetch it
        is; beyond its part it takes nothing of what others keep in theirs. The order is that of `worker.core.victims`.
        """
        short = pages - self.pool.free
        if short <= 0:
            return True
        if self._counts.now + self._counts.hinted < short:
            return False
        found = self._victims(now, below, tenant)
        if found.total < short:
            return False
        short -= self._drop_unsaved(found.unsaved, short, now)
        spare = 0 if below is not None else min(found.pages, self.pool.total // 64, _SPARE_TIMES * short)
        for rank, block, layers in found.first(max(short, spare)) if short > 0 else ():
            self.purged[rank] += len(layers)
            self._strip(block, layers)
            if not block.ready.any():
                self._drop(block)
        return True

    def room(self, now: float, below: Limit, tenant: str | None = None) -> int:
        """Pages that `make_room` could give with these arguments."""
        return self.pool.free + self._victims(now, below, tenant).total

    def weigh(self, tenant: str, weight: float) -> None:
        """The tenant asks for something here."""
        if len(self.weights) >= MOST_WEIGHTS:
            self.weights.clear()
        self.weights[tenant] = weight

    def _victims(self, now: float, below: Limit | None, tenant: str | None) -> Victims:
        blocks = self.index.values()
        within = within_parts(blocks, self.standings, now, self.pool.total, lambda t: self.weights.get(t, 1.0))
        spare = tenant is not None and tenant not in within
        by_layer, hold = self.layer_priority, self.hold_hinted
        return victims(blocks, self.standings, now, by_layer=by_layer, hold_hinted=hold, below=below, within=within, spare=spare)

    def free_held(self) -> bool:
        """What is held (`hold_hinted`) for sessions whose requests are here is held no longer: they may wait for who needs room now, and
        nothing else would ever end that. A hint whose request has not come ends by itself. False: nothing was held so."""
        held = [b for b in self.index.values() if self._reach(b) is Reach.HINTED and any(map(self.standings.is_here, b.sessions))]
        for block in held:
            self.hints_wasted += int((block.hinted & block.ready).sum())
            block.hinted[:] = False
            self._count(block)
        return bool(held)

    def _drop_unsaved(self, blocks: list[Block], short: int, now: float) -> int:
        """Drop blocks that were not saved until `short` pages are free or none is left. Returns the number of pages."""
        freed = 0
        for block in sorted(blocks, key=lambda b: (self.standings.strongest(b.sessions, now)[2], -b.index)):
            if freed >= short:
                break
            held = block.held
            self.purged[Rank.LOST_CAUSE] += held
            self._drop(block)
            freed += held
        return freed

    def available(self) -> int:
        """Pages that are free or could be made so at once."""
        return self.pool.free + self._counts.now

    def coming(self) -> int:
        """Pages that nobody uses and that could be purged once their saving, or a read into their block, has ended."""
        return self._counts.later

    @property
    def obtainable(self) -> int:
        """Pages that are free, or will be without anybody being preempted."""
        return self.pool.free + self._counts.now + self._counts.later

    def validate(self, in_use: Iterable[Block] = ()) -> None:
        """Raise AssertionError when an invariant does not hold. `in_use`: private blocks of sequences."""
        self.pool.validate()
        blocks = {id(b): b for b in [*self.index.values(), *in_use]}.values()
        pages = [int(p) for b in blocks for p in b.pages if p != NO_PAGE]
        assert len(pages) == len(set(pages)), "two blocks share a page"
        assert self.pool.taken == len(pages), "a taken page belongs to no block"
        for key, block in self.index.items():
            assert block.key == key and not block.lost
        for block in blocks:
            assert not ((block.ready | block.hinted) & (block.pages == NO_PAGE)).any()
            assert block.users >= 0 and block.moving >= 0 and block.held == (block.pages != NO_PAGE).sum()
        walked = PageCounts()
        for block in self.index.values():
            reach = self._reach(block)
            assert block.counted == ((reach, block.held) if reach else (Reach.NEVER, 0)), "a block was counted wrongly"
            walked.add(*block.counted)
        assert walked == self._counts, "pages that could be had were counted wrongly"
