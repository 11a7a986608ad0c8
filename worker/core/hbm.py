"""The blocks in HBM: index, reference counts, and eviction.

A block holds one chunk: a page per layer, or none for a layer that was purged or is not loaded. Sequences use blocks.
An unused block that a lower tier has is *cached*: usable, and purgeable at any time without a transfer (SYMPHONY,
section 3.4, cooperative memory). The order of victims is in `worker.core.victims`.

Invariants (`validate`):
- A block in the index has its index key; two blocks never share a page.
- A block in use, with a transfer under way, or waiting to be saved is never purged. Exception: what all of its users
  have passed (`worker.core.windowed`).
- `ready[l]` and `hinted[l]` are only true where `pages[l]` is a page.
- Reclaimable pages are counted incrementally (`worker.core.page_counts`), so a block's `users`, `passed`, `moving`,
  `save` and `hinted` change only here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import dataclass, field

import numpy as np

from contracts.ids import SessionKey
from contracts.kv import leading
from contracts.memory.victim_order import Rank, Standing
from worker.core.block import NO_PAGE, Block, Reach, SaveState
from worker.core.emptied import slabs_to_empty
from worker.core.owners import Owners
from worker.core.page_counts import PageCounts
from worker.core.pages import PagePool
from worker.core.standings import Standings
from worker.core.supply import FIXED, Supply
from worker.core.victims import Limit, Victims, victims, within_parts
from worker.core.windowed import NO_WINDOWS, Windowed

#: Without a limit, `make_room` purges up to this many times what is needed.
_SPARE_TIMES = 16


@dataclass(slots=True)
class HbmCache:
    """The blocks of one model, over one PagePool. layer_priority: off, whole chunks are purged. supply: the rest of the
    device's memory. windowed: the model's layers with a window; by default there are none.

    hold_hinted: pages loaded for a live hint are not purged before a request has used them; the opposite of cooperative
    memory.
    """

    pool: PagePool
    layer_priority: bool = True
    hold_hinted: bool = False
    windowed: Windowed = NO_WINDOWS
    index: dict[bytes, Block] = field(default_factory=dict)
    standings: Standings = field(default_factory=Standings)
    #: Pages purged to make room, by the victim's rank.
    purged: Counter[Rank] = field(default_factory=Counter)
    #: Pages filled for a hint: those that a request used, and those that left unused.
    hints_used: int = 0
    hints_wasted: int = 0
    #: Ready pages that requests found in HBM.
    hits: int = 0
    supply: Supply = FIXED
    _counts: PageCounts = field(default_factory=PageCounts)
    _owners: Owners = field(default_factory=Owners)

    def __post_init__(self) -> None:
        if not len(self.windowed.layers):
            self.windowed = Windowed(np.zeros(self.pool.layers, bool), 0, 1)

    # ---- blocks ------------------------------------------------------------------------------------------------
    def new_block(self, index: int, session: SessionKey, layers: Iterable[int]) -> Block:
        """A block with pages for `layers`, not yet in use. Raises MemoryError unless the caller has made room."""
        count = self.pool.layers
        block = Block(index, np.full(count, NO_PAGE, np.int64), np.zeros(count, bool), np.zeros(count, bool))
        self._owners.add(block, session)
        self.fill(block, layers)
        return block

    def fill(self, block: Block, layers: Iterable[int]) -> None:
        """Give the block pages for `layers`, none of which it has. Raises MemoryError as `new_block`."""
        at = list(layers)
        assert (block.pages[at] == NO_PAGE).all()
        for layer in at:
            block.pages[layer] = self.pool.take(layer)
            block.held += 1
        self._count(block)

    def enter(self, block: Block, key: bytes) -> bool:
        """Put the block into the index under `key`. False if a block that is complete or in use is there already, or
        this one was lost while a sequence computed it: it stays private."""
        if block.lost:
            return False
        other = self.index.get(key)
        if other is not None and other is not block:
            if other.complete or other.users or other.moving or other.save == SaveState.WAITING:
                return False
            self._drop(other)
        block.key = key
        self.index[key] = block
        self._count(block)
        return True

    def want(self, block: Block, session: SessionKey) -> None:
        """Add the block to this session's cache."""
        self._owners.add(block, session)

    def use(self, block: Block) -> None:
        """A sequence uses the block from now on."""
        block.users += 1
        self._count(block)

    def match(self, keys: list[bytes], session: SessionKey) -> list[Block]:
        """A sequence uses the leading blocks of these chunks that are in the index, from now on.

        Where layers have windows, a later block is of use without those before it: blocks that are missing before the
        last one are made, without pages, to be loaded or passed.
        """
        count, found = leading(key in self.index for key in keys), []
        if self.windowed.tokens:
            count = max((n for n, key in enumerate(keys, 1) if key in self.index), default=0)
        for position, key in enumerate(keys[:count]):
            if (block := self.index.get(key)) is None:
                block = self.new_block(position, session, ())
                self.mark(block, SaveState.BELOW)
                self.enter(block, key)
            block.index = position  # the key fixes the position; a hint's load only guessed it
            self.use(block)
            found.append(block)
        return found

    def pass_(self, blocks: Iterable[Block], by: int = 1) -> None:
        """A user of these blocks has passed them. -1: it has not, after all. Frees what nobody can read any more."""
        for block in blocks:
            block.passed += by
            self._count(block)
            unlisted = block.key is None or block.lost
            if unlisted and block.passed == block.users and not block.moving and block.save is not SaveState.WAITING:
                self._strip(block, np.flatnonzero(self.windowed.layers).tolist())

    def pin(self, block: Block) -> None:
        """A transfer into or out of the block begins."""
        block.moving += 1
        self._count(block)

    def unpin(self, block: Block) -> None:
        """A transfer has ended; the caller then calls `settle`, `give_up` or `lose`."""
        block.moving -= 1
        self._count(block)

    def mark(self, block: Block, save: SaveState) -> None:
        """Set the block's save state."""
        block.save = save
        self._count(block)

    def hint(self, block: Block, layers: list[int]) -> None:
        """Mark the pages of these layers as taken for a hint."""
        block.hinted[layers] = True
        self._count(block)

    def claim(self, blocks: list[Block]) -> None:
        """A request found these blocks and will use them: counts hits, and hinted pages as used."""
        if not blocks:
            return
        ready = np.array([block.ready for block in blocks])
        self.hits += int(ready.sum())
        hinted = np.array([block.hinted for block in blocks])
        self.hints_used += int((hinted & ready).sum())
        for i in np.flatnonzero(hinted.any(axis=1)).tolist():
            blocks[i].hinted[:] = False
            self._count(blocks[i])

    def release(self, block: Block, passed: bool = False) -> None:
        """A sequence no longer uses the block, which it had `passed` or not. Frees it as `settle` does."""
        block.users -= 1
        block.passed -= passed
        self._count(block)
        self.settle(block)

    def settle(self, block: Block) -> None:
        """Free the block if it is unused and not cached (private, lost or empty); else free its unfilled pages."""
        if block.users or block.moving or block.save == SaveState.WAITING:
            return
        if block.key is None or block.lost or not (block.pages != NO_PAGE).any():
            self._drop(block)
        elif not block.ready.all():
            # An aborted load leaves pages that were never filled.
            self._strip(block, [int(layer) for layer in np.flatnonzero((block.pages != NO_PAGE) & ~block.ready)])
            if not block.ready.any():
                self._drop(block)

    def give_up(self, block: Block, layers: list[int]) -> None:
        """Free the pages of those of `layers` that are not ready: they will not arrive. Then `settle`."""
        self._strip(block, [layer for layer in layers if not block.ready[layer]])
        self.settle(block)

    def lose(self, block: Block) -> None:
        """A piece could not be loaded: remove the block from the index."""
        self._unlist(block)
        self.settle(block)

    def erase(self, key: bytes) -> None:
        """The chunk was erased: drop its block now, or when it is no longer in use."""
        block = self.index.get(key)
        if block is not None:
            if block.save == SaveState.WAITING:
                self.mark(block, SaveState.REFUSED)
            self.lose(block)

    def forget(self, sessions: Set[SessionKey]) -> None:
        """The sessions were erased: like `erase`, for blocks that no other session references, saved or not."""
        for block in self._owners.of(sessions):
            if block.key is None or self.index.get(block.key) is not block:
                continue
            if block.sessions.keys() <= sessions:
                self.erase(block.key)
            else:
                self._owners.leave(block, sessions)

    def _strip(self, block: Block, layers: list[int]) -> None:
        at = np.array(layers, np.intp)
        taken = at[block.pages[at] != NO_PAGE]
        self.pool.give(block.pages[taken].tolist())
        self.hints_wasted += int((block.hinted & block.ready)[taken].sum())
        block.pages[taken] = NO_PAGE
        block.held -= len(taken)
        block.ready[taken] = block.hinted[taken] = False
        self._count(block)

    def _drop(self, block: Block) -> None:
        self._strip(block, list(range(self.pool.layers)))
        self._unlist(block)

    def _unlist(self, block: Block) -> None:
        """Remove the block from the index, for good."""
        block.lost = True
        self._owners.lost(block)
        if block.key is not None and self.index.get(block.key) is block:
            del self.index[block.key]
        self._count(block)

    # ---- counts ------------------------------------------------------------------------------------------------
    def _count(self, block: Block) -> None:
        reach = self._reach(block)
        self._counts.count(block, reach, self._reclaimable(block) if reach else 0)

    def _reclaimable(self, block: Block) -> int:
        """Pages that the block's reach is about."""
        return int((block.pages[self.windowed.layers] != NO_PAGE).sum()) if block.users else block.held

    def _reach(self, block: Block) -> Reach:
        if (block.users and not block.outside) or block.key is None or block.lost:
            return Reach.NEVER
        if block.moving or block.save is SaveState.WAITING:
            return Reach.LATER
        if not block.users and not block.purgeable:
            return Reach.NEVER
        return Reach.HINTED if self.hold_hinted and block.hinted.any() else Reach.NOW

    # ---- room --------------------------------------------------------------------------------------------------
    def make_room(self, pages: int, now: float, below: Limit | None = None, tenant: str | None = None) -> bool:
        """Make `pages` pages free: of the device's unused memory, else by purging, here or in other models' caches,
        what is worth least. Returns False, having purged nothing here, if that is impossible.

        below: for a prefetch, only victims that rank under this (rank, -priority, -layer). tenant: the prefetch's;
        beyond its share it displaces nothing that others hold within theirs. The order is that of
        `worker.core.victims`.
        """
        self.supply.grow(pages - self.pool.free)
        short = pages - self.pool.free
        if short <= 0:
            return True
        if self._counts.now + self._counts.hinted + self.supply.cached() < short:
            return False
        found = self._victims(now, below, tenant)
        limit = None if below is None else Standing(Rank(below[0]), below[1], -math.inf)
        if (coldest := found.coldest()) is not None:
            self.supply.purge(short, now, coldest if limit is None else min(coldest, limit))
        self.supply.purge(pages - self.pool.free - found.total, now, limit)
        short = pages - self.pool.free
        if found.total < short:
            return False
        self._leave(found, short, now, _SPARE_TIMES if below is None else 0)
        return True

    def shrink(self, pages: int, now: float) -> None:
        """Purge up to so many pages, those of least worth first."""
        if pages > 0:
            self._leave(self._victims(now, None, None), pages, now)

    def _leave(self, found: Victims, pages: int, now: float, times: int = 0) -> None:
        """Purge so many of the victims' pages; or, if few and so that next calls need not search, `times` as many."""
        pages -= self._drop_unsaved(found.unsaved, pages, now) if pages > 0 else 0
        spare = min(found.pages, self.pool.total // 64, times * pages)
        for rank, block, layers in found.first(max(pages, spare)) if pages > 0 else ():
            self._purge(rank, block, layers)

    def empty_slabs(self, slabs: int, now: float, under: Standing | None = None) -> None:
        """Purge the pages of up to `slabs` slabs, for another model. under: only what ranks under it, and is not kept
        for its tenant."""
        ranked = self._victims(now, None, None).ranked()
        for block, layers, rank in [
            (each.block, each.layers, each.of.standing.rank)
            for each in slabs_to_empty(ranked, self.pool, slabs, by_layer=self.layer_priority, under=under)
        ]:
            if block.unsaved:
                self.purged[Rank.UNSAVED] += block.held
                self._drop(block)
            else:
                self._purge(rank, block, layers)

    def _purge(self, rank: Rank, block: Block, layers: list[int]) -> None:
        self.purged[rank] += len(layers)
        self._strip(block, layers)
        if not block.users and not block.ready.any():
            self._drop(block)

    def room(self, now: float, below: Limit, tenant: str | None = None) -> int:
        """Pages that `make_room` could provide with these arguments."""
        return self.pool.free + self.supply.unused() + self._victims(now, below, tenant).total

    def _victims(self, now: float, below: Limit | None, tenant: str | None) -> Victims:
        blocks = self.index.values()
        within = within_parts(blocks, self.standings, now, self.pool.total, self.standings.weight)
        spare = tenant is not None and tenant not in within
        by_layer, hold = self.layer_priority, self.hold_hinted
        return victims(
            blocks, self.standings, now, by_layer=by_layer, hold_hinted=hold, below=below, within=within, spare=spare,
            windowed=self.windowed,
        )  # fmt: skip

    def free_held(self) -> bool:
        """Release pages held (`hold_hinted`) for hinted sessions whose requests are here. Such a request may wait for
        the one that needs room: a deadlock. Other hints expire. Returns whether any were held."""
        held = [
            b
            for b in self.index.values()
            if self._reach(b) is Reach.HINTED and any(map(self.standings.is_here, b.sessions))
        ]
        for block in held:
            self.hints_wasted += int((block.hinted & block.ready).sum())
            block.hinted[:] = False
            self._count(block)
        return bool(held)

    def _drop_unsaved(self, blocks: list[Block], short: int, now: float) -> int:
        """Drop unsaved blocks until `short` pages are freed or none is left. Returns the number of pages freed."""
        freed = 0
        for block in sorted(blocks, key=lambda b: (self.standings.strongest(b.sessions, now)[2], -b.index)):
            if freed >= short:
                break
            held = block.held
            self.purged[Rank.UNSAVED] += held
            self._drop(block)
            freed += held
        return freed

    def available(self) -> int:
        """Pages that are free or purgeable now, here or in the rest of the device."""
        return self.pool.free + self._counts.now + self.supply.unused() + self.supply.cached()

    @property
    def cached(self) -> int:
        """Pages that are purgeable now."""
        return self._counts.now

    def coming(self) -> int:
        """Unused pages that become purgeable when their save or load ends."""
        return self._counts.later

    @property
    def obtainable(self) -> int:
        """Pages that are free or will be, without preemption."""
        return self.available() + self._counts.later

    def validate(self, in_use: Iterable[Block] = ()) -> None:
        """Raise AssertionError when an invariant does not hold. `in_use`: private blocks of sequences."""
        self.pool.validate()
        blocks = list({id(b): b for b in [*self.index.values(), *in_use]}.values())
        pages = np.array([b.pages for b in blocks]).reshape(len(blocks), self.pool.layers)
        here = pages != NO_PAGE
        assert len(np.unique(pages[here])) == here.sum(), "two blocks share a page"
        assert self.pool.taken == here.sum(), "a taken page belongs to no block"
        for key, block in self.index.items():
            assert block.key == key and not block.lost
        self._owners.validate(blocks)
        usable = np.array([b.ready | b.hinted for b in blocks], bool).reshape(here.shape)
        assert not (usable & ~here).any()
        for block, held in zip(blocks, here.sum(axis=1).tolist(), strict=True):
            assert block.users >= block.passed >= 0 <= block.moving and block.held == held
        walked = PageCounts()
        for block in self.index.values():
            reach = self._reach(block)
            reclaimable = self._reclaimable(block) if reach else 0
            assert block.counted == (reach, reclaimable), "a block was counted wrongly"
            walked.add(*block.counted)
        assert walked == self._counts, "pages that could be had were counted wrongly"
