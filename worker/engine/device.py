"""What the engine's parts share: the cache in HBM, its memory, and the way to the store.

All of it belongs to the engine's thread, except the load table's condition and what StoreLink and KvLoader say of
themselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from contracts.convert import layers_to_bitmap, session_to_wire
from contracts.ids import SessionKey
from contracts.kv import KvShape
from contracts.v1 import kvstore_pb2
from runtime import telemetry
from runtime.clock import Clock
from runtime.config import KvSection
from worker.core.hbm import NO_PAGE, Block, HbmCache
from worker.core.load_plan import LoadRates
from worker.core.pages import Pages
from worker.link.kv_loader import KvLoader
from worker.link.loads import Load, LoadTable
from worker.link.store_link import StoreLink
from worker.memory.paged_kv import PagedKv

log = telemetry.logger("worker.engine.device")
#: How long a store that did not answer is left alone, in seconds.
REST_S = 30.0


@dataclass(slots=True)
class Device:
    """One device: its pages, the blocks on them, and its store. `salt_of` gives a tenant's chunk-key salt."""

    shape: KvShape
    kv: PagedKv
    cache: HbmCache
    table: LoadTable
    loader: KvLoader
    clock: Clock
    settings: KvSection
    salt_of: Callable[[str], bytes]
    link: StoreLink | None = None
    #: A store is there, whether or not it answers.
    attached: bool = False
    #: What loads took lately, by where they came from.
    rates: LoadRates = field(default_factory=LoadRates)
    #: It has not answered in time: nothing is asked of it before.
    _rests_until_s: float = 0.0
    _ids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def back(self) -> None:
        """Give memory to the slabs that the ledger has begun to use; call before touching new pages."""
        pending, self.cache.pool.to_map = self.cache.pool.to_map, []
        for slab in pending:
            self.kv.map_slab(slab)

    @property
    def store_here(self) -> bool:
        """The store can be asked."""
        return self.attached and self.clock.now() >= self._rests_until_s

    def fell_silent(self) -> None:
        """The store did not answer in time: nothing is asked of it until it says something, or for REST_S seconds."""
        if self.store_here:
            log.warning("the store does not answer; computing without it", rest_s=REST_S)
        self._rests_until_s = self.clock.now() + REST_S

    def heard(self) -> None:
        """The store said something."""
        self._rests_until_s = 0.0

    def next_id(self) -> int:
        """A new id for a load, save or query."""
        return next(self._ids)

    def tell(self, **kind: object) -> None:
        """Send one message to the store."""
        if self.link is not None:
            self.link.send(kvstore_pb2.WorkerToStore(**kind))  # type: ignore[arg-type]

    def open_load(
        self,
        session: SessionKey,
        keys: list[bytes],
        blocks: list[Block],
        layers: list[list[int]],
        load_class: kvstore_pb2.LoadClass,
        priority: int,
        source_nodes: list[str],
    ) -> Load:
        """Ask the store for `layers[i]` of chunk `keys[i]`, into `blocks[i]`; the pages are there already."""
        self.back()
        load = Load(self.next_id(), session, blocks, layers, _pages(blocks, layers), hint=load_class == kvstore_pb2.PREFETCH)
        load.asked_s = self.clock.now()
        for block in blocks:
            block.moving += 1
        self.table.open[load.load_id] = load
        wants = [
            kvstore_pb2.ChunkWant(key=key, layers=layers_to_bitmap(wanted, self.shape.layers))
            for key, wanted in zip(keys, layers, strict=True)
        ]
        self.tell(
            load=kvstore_pb2.LoadRequest(
                load_id=load.load_id,
                load_class=load_class,
                session=session_to_wire(session),
                fingerprint=self.shape.fingerprint,
                chunks=wants,
                source_nodes=source_nodes,
                priority=priority,
            )
        )
        return load

    def abort_load(self, load: Load) -> None:
        """Give a load up. When this returns its pages are touched no more, and free as far as they have not come and nobody uses them."""
        load.cancelled = True
        self.loader.halt(load)
        self.tell(cancel=kvstore_pb2.LoadCancel(load_id=load.load_id))
        self.close_load(load)

    def close_load(self, load: Load) -> None:
        """The loader is done with it: unpin. Blocks that miss pieces which a sequence waits for are lost. May be told twice."""
        if self.table.open.pop(load.load_id, None) is None:
            return
        self._learn(load)
        for block, layers in zip(load.blocks, load.layers, strict=True):
            block.moving -= 1
            if block.ready[layers].all() or block.key is None or block.lost:
                self.cache.settle(block)
            elif load.hint or not block.users:
                self.cache.give_up(block, layers)
            else:
                self.cache.lose(block)

    def _learn(self, load: Load) -> None:
        """What the slowest source of the load took; what came from the arena beside it came at once."""
        if not load.came or not load.sources or load.cancelled or load.hint:
            return
        slowest = max(load.sources)
        pieces = sum(len(w) for w, source in zip(load.layers, load.sources, strict=False) if source == slowest)
        if pieces:
            self.rates.observed(slowest, load.first_s - load.asked_s, (load.last_s - load.first_s) / pieces, self.clock.now())


def _pages(blocks: list[Block], layers: list[list[int]]) -> Pages:
    """`[blocks, layers]`: the pages of the wanted layers, NO_PAGE elsewhere."""
    pages = np.full((len(blocks), len(blocks[0].pages) if blocks else 0), NO_PAGE, np.int64)
    for row, block, wanted in zip(pages, blocks, layers, strict=True):
        row[wanted] = block.pages[wanted]
    return pages
