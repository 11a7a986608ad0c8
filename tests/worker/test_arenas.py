"""What a store says of pieces and room is about its own arena: never about that of the store that comes after it."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable

import numpy as np

from contracts.convert import session_to_wire
from contracts.ids import SessionKey
from contracts.kv import KvShape
from contracts.v1 import kvstore_pb2
from runtime import telemetry
from storelink.ends import ArenaGone, ArenaHere
from storelink.link import StoreLink
from tests.kvstore.conftest import Stack, make_stack
from tests.kvstore.store_metrics import store_metrics
from tests.worker.owners import KV
from worker.core.events import SaveCopied, StoreDown, StoreUp
from worker.core.hbm import HbmCache
from worker.core.pages import PagePool, Pages
from worker.link.ends import end_of
from worker.link.kv_loader import KvLoader
from worker.link.loads import LoadTable, SaveOffer, Transfer
from worker.memory.copier import Arena, HostCopier
from worker.memory.device_memory import host_memory
from worker.memory.paged_kv import PagedKv

__all__ = ["make_stack"]
SHAPE = KvShape.of_heads(b"f" * 32, 2, 2, 16, 16, "float32")
SIZE = SHAPE.piece_bytes


class Link:
    """A link that is attached to the second store by the time anything is copied."""

    def __init__(self) -> None:
        self.sent: list[kvstore_pb2.WorkerToStore] = []

    def send(self, message: kvstore_pb2.WorkerToStore) -> None:
        self.sent.append(message)


def test_pieces_and_grants_that_wait_are_of_the_arena_of_the_store_that_sent_them() -> None:
    kv = PagedKv.reserve(host_memory(4 << 20, 64 << 10), SHAPE, 64, KV)
    cache = HbmCache(PagePool(kv.slab_count, kv.pages_per_slab, SHAPE.layers))
    session = SessionKey("t", "s")
    loaded, saved = cache.new_block(0, session, range(2)), cache.new_block(0, session, range(2))
    for slab in range(kv.slab_count):
        kv.map_slab(slab)
    for page in saved.pages:
        kv.page_bytes_view(page)[:] = 9
    first, second = np.full(8 * SIZE, 1, np.uint8), np.full(8 * SIZE, 2, np.uint8)
    table, inbox, link, left = LoadTable(), queue.SimpleQueue[object](), Link(), threading.Semaphore(0)
    table.open[1] = Transfer.of(1, np.stack([loaded.pages]), hint=False)
    loader = KvLoader(kv, table, inbox.put)
    loader.link = link  # type: ignore[assignment]
    loader.from_store(ArenaHere(first.data))
    loader.offer(SaveOffer(7, np.stack([saved.pages])))
    loader.from_store(kvstore_pb2.LoadPieces(load_id=1, chunks=[0, 0], layers=[0, 1], offsets=[0, SIZE]))
    loader.from_store(kvstore_pb2.SaveGrant(save_id=7, indices=[0], offsets=[4 * SIZE, 5 * SIZE]))
    loader.from_store(ArenaGone(left.release))
    loader.from_store(kvstore_pb2.LoadPieces(load_id=1, chunks=[0], layers=[0], offsets=[2 * SIZE]))
    loader.from_store(ArenaHere(second.data))
    loader.start()
    assert left.acquire(timeout=10) and left.acquire(timeout=10)
    while not isinstance(copied := inbox.get(timeout=10), SaveCopied):
        pass
    assert copied.ok == [0]
    assert all((kv.page_bytes_view(page) == 1).all() for page in loaded.pages)
    assert (first[4 * SIZE : 6 * SIZE] == 9).all()
    assert (second == 2).all(), "nothing was written into another store's arena"
    loader.stop()


class SlowCopier(HostCopier):
    """Each save begins, and waits for `go` in the midst of it."""

    def __init__(self, kv: PagedKv) -> None:
        super().__init__(kv)
        self.begun, self.go = threading.Event(), threading.Event()

    def save(self, arena: Arena, offsets: Pages, pages: Pages) -> None:
        self.begun.set()
        assert self.go.wait(30)
        super().save(arena, offsets, pages)


async def test_what_a_worker_still_copies_when_its_stream_ends_is_given_to_nobody_until_it_has_ended(
    make_stack: Callable[..., Stack],
) -> None:
    stack = make_stack(nodes=1)
    stack.start(0)
    kv = PagedKv.reserve(host_memory(4 << 20, 64 << 10), SHAPE, 64, KV)
    cache = HbmCache(PagePool(kv.slab_count, kv.pages_per_slab, SHAPE.layers))
    for slab in range(kv.slab_count):
        kv.map_slab(slab)
    inbox, copier = queue.SimpleQueue[object](), SlowCopier(kv)
    loader = KvLoader(kv, LoadTable(), inbox.put, copier)
    link = loader.link = StoreLink(
        stack.address(0), "w", [end_of(SHAPE, inbox.put, loader.from_store)], telemetry.logger("link")
    )
    loader.start()
    attached = asyncio.ensure_future(link.run())
    assert isinstance(await asyncio.to_thread(inbox.get, timeout=30), StoreUp)
    session = SessionKey("t", "s")
    loader.offer(SaveOffer(7, np.stack([cache.new_block(0, session, range(2)).pages])))
    wanted = kvstore_pb2.SaveRequest(
        save_id=7, session=session_to_wire(session), fingerprint=SHAPE.fingerprint, keys=[b"k" * 32]
    )
    link.send(kvstore_pb2.WorkerToStore(save=wanted))
    assert await asyncio.to_thread(copier.begun.wait, 30)
    attached.cancel()
    assert isinstance(await asyncio.to_thread(inbox.get, timeout=30), StoreDown)
    await asyncio.sleep(0.5)
    assert (await store_metrics(stack.address(0)))['held{what="reserved_slots"}'] == SHAPE.layers
    copier.go.set()
    async with asyncio.timeout(30):
        while (await store_metrics(stack.address(0)))['held{what="reserved_slots"}']:  # noqa: ASYNC110 - another process's
            await asyncio.sleep(0.05)
    loader.stop()
