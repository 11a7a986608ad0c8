"""State shared by the parts of an engine's core: the cache in HBM, open loads, and the store's availability."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from contracts.ids import SessionKey
from contracts.kv import KvShape
from storelink.core.load_plan import LoadRates
from worker.core import instructions as do
from worker.core.arbitration import Order
from worker.core.block import NO_PAGE, Block
from worker.core.events import LoadClosed, PiecesCame
from worker.core.hbm import HbmCache
from worker.core.load import Load
from worker.core.pages import Pages
from worker.core.policy import Policy
from worker.core.token_rate import TokenRate

#: How long a silent store is not asked, in seconds.
REST_S = 30.0


@dataclass(slots=True)
class CoreState:
    """See the module. salt_of: a tenant's chunk-key salt. model_name: for manifests.

    Invariants: a block's `moving` is the number of open loads and pending saves that hold it. A load is in `loads`
    until it is closed or aborted.
    """

    shape: KvShape
    cache: HbmCache
    policy: Policy
    salt_of: Callable[[str], bytes]
    model_name: str = ""
    #: Ids for loads and saves.
    ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    #: Time of the current event or turn.
    now: float = 0.0
    #: Instructions not yet taken.
    out: list[do.Instruction] = field(default_factory=list)
    #: Open loads by id.
    loads: dict[int, Load] = field(default_factory=dict)
    #: A store is attached, whether or not it answers.
    attached: bool = False
    #: Recent load rates by source.
    rates: LoadRates = field(default_factory=LoadRates)
    token_rate: TokenRate = field(default_factory=TokenRate)
    #: The order of sequences that wait for their first token.
    order: Order = field(default_factory=Order)
    #: A silent store is not asked before this time.
    _rests_until_s: float = 0.0

    def next_id(self) -> int:
        """A new id for a load or a save."""
        return next(self.ids)

    def unmap(self) -> None:
        """Emit the pool's pending unmaps. Call before another model maps what this one has given up."""
        pool = self.cache.pool
        if pool.to_unmap:
            self.out.append(do.UnmapSlabs(pool.to_unmap))
            pool.to_unmap = []

    def back(self) -> None:
        """Emit the pool's pending unmaps and maps. Call before new pages are touched."""
        self.unmap()
        pool = self.cache.pool
        if pool.to_map:
            self.out.append(do.MapSlabs(pool.to_map))
            pool.to_map = []

    # ---- the store ---------------------------------------------------------------------------------------------
    @property
    def store_here(self) -> bool:
        """Whether the store can be asked."""
        return self.attached and self.now >= self._rests_until_s

    def fell_silent(self) -> None:
        """The store did not answer in time: do not ask it for REST_S seconds, or until it sends something."""
        if self.store_here:
            self.out.append(do.Note("the store does not answer; computing without it", {"rest_s": REST_S}, bad=True))
        self._rests_until_s = self.now + REST_S

    def heard(self) -> None:
        """The store sent a message."""
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
        request_id: str = "",
    ) -> Load:
        """Ask the store for `layers[i]` of chunk `keys[i]`, into existing pages of `blocks[i]`. Pins the blocks."""
        self.back()
        load = Load(self.next_id(), session, blocks, layers, hint, self.now)
        for block in blocks:
            self.cache.pin(block)
        self.loads[load.load_id] = load
        pages = _pages(blocks, layers)
        self.out.append(
            do.OpenLoad(load.load_id, session, keys, layers, pages, hint, priority, source_nodes, request_id)
        )
        return load

    def came(self, event: PiecesCame) -> None:
        """Mark pieces of a load as ready. Ignored if the load was aborted meanwhile."""
        if (load := self.loads.get(event.load_id)) is not None:
            for chunk, layer in zip(event.chunks.tolist(), event.layers.tolist(), strict=True):
                load.blocks[chunk].ready[layer] = True

    def abort_load(self, load: Load) -> None:
        """Abort a load. Frees its unfilled pages unless a sequence uses them."""
        load.cancelled = True
        self.out.append(do.HaltLoad(load.load_id))
        self._close(load)

    def closed(self, event: LoadClosed) -> Load | None:
        """The load has ended. Blocks in use that miss pieces which are read are lost. Returns None if it was aborted
        before."""
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
            elif load.hint or not self.cache.windowed.waited_for(block, layers):
                self.cache.give_up(block, layers)
            else:
                self.cache.lose(block)

    def _learn(self, load: Load, event: LoadClosed) -> None:
        """Learn the rate of the load's slowest source; the time of faster ones is neglected."""
        if not event.came or not load.sources or load.cancelled or load.hint:
            return
        slowest = max(load.sources)
        pieces = sum(len(w) for w, source in zip(load.layers, load.sources, strict=False) if source == slowest)
        if pieces:
            self.rates.observed(
                slowest, event.first_s - load.asked_s, (event.last_s - event.first_s) / pieces, self.now
            )

    def coming(self, blocks: list[Block], passed: int) -> list[do.Coming]:
        """Layers still being loaded into these blocks, for a sequence that has passed the first `passed`. A layer that
        no load brings is listed with load 0."""
        found = []
        rows = [{id(b): row for row, b in enumerate(load.blocks)} for load in self.loads.values()] if blocks else []
        for block, unready in zip(blocks, self.cache.windowed.unready(blocks, passed) if blocks else (), strict=True):
            missing = set(np.flatnonzero(unready).tolist())
            for load, row_of in zip(self.loads.values(), rows, strict=True):
                if not missing:
                    break
                row = row_of.get(id(block))
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
    """int64 `[blocks, layers]`: the pages of the wanted layers, NO_PAGE elsewhere."""
    pages = np.full((len(blocks), len(blocks[0].pages) if blocks else 0), NO_PAGE, np.int64)
    for row, block, wanted in zip(pages, blocks, layers, strict=True):
        row[wanted] = block.pages[wanted]
    return pages
