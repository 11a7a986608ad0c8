"""What the parts of an engine's core share: the cache in HBM, the loads into it, and what is known of the store."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from contracts.ids import SessionKey
from contracts.kv import KvShape
from storelink.core.load_plan import LoadRates
from worker.core import instructions as do
from worker.core.events import LoadClosed, PiecesCame
from worker.core.hbm import NO_PAGE, Block, HbmCache
from worker.core.load import Load
from worker.core.pages import Pages
from worker.core.policy import Policy

#: How long a store that did not answer is left alone, in seconds.
REST_S = 30.0


@dataclass(slots=True)
class CoreState:
    """See the module. `salt_of` gives a tenant's chunk-key salt. model_name: as manifests name it.

    Invariants: `moving` of a block is the number of open loads and of saves under way that hold it. A load is open, and in `loads`, until
    it is closed or given up.
    """

    shape: KvShape
    cache: HbmCache
    policy: Policy
    salt_of: Callable[[str], bytes]
    model_name: str = ""
    #: Names of loads and saves.
    ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    #: When the event that is handled came, or the turn began.
    now: float = 0.0
    #: What is asked for and not executed yet.
    out: list[do.Instruction] = field(default_factory=list)
    #: Open loads by id.
    loads: dict[int, Load] = field(default_factory=dict)
    #: A store is there, whether or not it answers.
    attached: bool = False
    #: What loads took lately, by where they came from.
    rates: LoadRates = field(default_factory=LoadRates)
    #: It has not answered in time: nothing is asked of it before.
    _rests_until_s: float = 0.0

    def next_id(self) -> int:
        """A new id for a load or a save."""
        return next(self.ids)

    def back(self) -> None:
        """Give back memory that the ledger may not hold any more, and ask for memory for slabs that it has begun to use; before anything
        touches new pages."""
        pool = self.cache.pool
        if pool.to_unmap:
            self.out.append(do.UnmapSlabs(pool.to_unmap))
            pool.to_unmap = []
        if pool.to_map:
            self.out.append(do.MapSlabs(pool.to_map))
            pool.to_map = []

    # ---- the store ---------------------------------------------------------------------------------------------
    @property
    def store_here(self) -> bool:
        """The store can be asked."""
        return self.attached and self.now >= self._rests_until_s

    def fell_silent(self) -> None:
        """The store did not answer in time: nothing is asked of it until it says something, or for REST_S seconds."""
        if self.store_here:
            self.out.append(do.Note("the store does not answer; computing without it", {"rest_s": REST_S}, bad=True))
        self._rests_until_s = self.now + REST_S

    def heard(self) -> None:
        """The store said something."""
        self._rests_until_s = 0.0

    # ---- loads -------------------------------------------------------------------------------------------------
    def open_load(
        self,
        session: SessionKey,
        keys: list[bytes],
        blocks: list[Block],
        layers: list[list[int]],
        *,
        hint: bool,
        priority: int,
        source_nodes: list[str],
    ) -> Load:
        """Ask the store for `layers[i]` of chunk `keys[i]`, into `blocks[i]`; the pages are there already."""
        self.back()
        load = Load(self.next_id(), session, blocks, layers, hint, self.now)
        for block in blocks:
            self.cache.pin(block)
        self.loads[load.load_id] = load
        self.out.append(do.OpenLoad(load.load_id, session, keys, layers, _pages(blocks, layers), hint, priority, source_nodes))
        return load

    def came(self, event: PiecesCame) -> None:
        """Pieces of a load are in their pages. What came of one that was given up meanwhile is nothing."""
        if (load := self.loads.get(event.load_id)) is not None:
            for chunk, layer in zip(event.chunks.tolist(), event.layers.tolist(), strict=True):
                load.blocks[chunk].ready[layer] = True

    def abort_load(self, load: Load) -> None:
        """Give a load up: its pages are free as far as they have not come and nobody uses them."""
        load.cancelled = True
        self.out.append(do.HaltLoad(load.load_id))
        self._close(load)

    def closed(self, event: LoadClosed) -> Load | None:
        """The load has ended; None: it was given up before. Blocks that miss pieces which a sequence waits for are lost."""
        load = self.loads.get(event.load_id)
        if load is not None:
            self._learn(load, event)
            self._close(load)
        return load

    def _close(self, load: Load) -> None:
        load.closed = True
        del self.loads[load.load_id]
        for block, layers in zip(load.blocks, load.layers, strict=True):
            self.cache.unpin(block)
            if block.ready[layers].all() or block.key is None or block.lost:
                self.cache.settle(block)
            elif load.hint or not block.users:
                self.cache.give_up(block, layers)
            else:
                self.cache.lose(block)

    def _learn(self, load: Load, event: LoadClosed) -> None:
        """What the slowest source of the load took; what came from the arena beside it came at once."""
        if not event.came or not load.sources or load.cancelled or load.hint:
            return
        slowest = max(load.sources)
        pieces = sum(len(w) for w, source in zip(load.layers, load.sources, strict=False) if source == slowest)
        if pieces:
            self.rates.observed(slowest, event.first_s - load.asked_s, (event.last_s - event.first_s) / pieces, self.now)

    def coming(self, blocks: list[Block]) -> list[do.Coming]:
        """What is still on its way into these blocks. A layer that no load brings is listed too, as of load 0: it will not come."""
        found = []
        for block in blocks:
            missing = set(np.flatnonzero(~block.ready).tolist())
            for load in self.loads.values():
                if not missing:
                    break
                row = next((n for n, b in enumerate(load.blocks) if b is block), None)
                if row is not None and (brings := missing.intersection(load.layers[row])):
                    found.append(do.Coming(load.load_id, row, frozenset(brings)))
                    missing -= brings
            if missing:
                found.append(do.Coming(0, 0, frozenset(missing)))
        return found

    def validate(self, blocks_in_use: list[Block]) -> None:
        """Raise AssertionError when an invariant does not hold."""
        self.cache.validate([*blocks_in_use, *(b for load in self.loads.values() for b in load.blocks)])
        assert not any(load.closed for load in self.loads.values())


def _pages(blocks: list[Block], layers: list[list[int]]) -> Pages:
    """`[blocks, layers]`: the pages of the wanted layers, NO_PAGE elsewhere."""
    pages = np.full((len(blocks), len(blocks[0].pages) if blocks else 0), NO_PAGE, np.int64)
    for row, block, wanted in zip(pages, blocks, layers, strict=True):
        row[wanted] = block.pages[wanted]
    return pages
