"""Copies on streams: what waits for what, checked over streams that run when a test says so."""

from __future__ import annotations

import ctypes
import itertools
import queue
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from contracts.ids import SessionKey
from contracts.kv import KvShape
from contracts.v1 import kvstore_pb2
from storelink.ends import ArenaHere
from tests.worker.owners import KV
from worker.core.events import LoadClosed
from worker.core.hbm import HbmCache
from worker.core.pages import PagePool
from worker.link.kv_loader import KvLoader
from worker.link.loads import LoadTable, Transfer, Wake
from worker.memory.cuda_copier import CudaCopier
from worker.memory.cuda_driver import CudaError
from worker.memory.device_memory import host_memory
from worker.memory.paged_kv import PagedKv

SHAPE = KvShape.of_heads(fingerprint=bytes(32), layers=2, kv_heads=1, head_dim=16, chunk_tokens=16, dtype="float32")


class Mark:
    def __init__(self) -> None:
        self.event = threading.Event()

    def reached(self) -> bool:
        return self.event.is_set()

    def wait(self) -> None:
        assert self.event.wait(20)


class Stream:
    """Work that runs, in order, when `run` is called; it stops at marks of others that are not reached."""

    def __init__(self) -> None:
        self.work: list[Any] = []

    def copy(self, to: np.ndarray, source: np.ndarray, bytes_: int) -> None:
        self.work.append([(int(a), int(b), bytes_) for a, b in zip(to, source, strict=True)])

    def mark(self) -> Mark:
        made = Mark()
        self.work.append(made.event.set)
        return made

    def wait_for(self, mark: Mark) -> None:
        self.work.append(mark)

    def compute(self, done: list[str], name: str) -> None:
        self.work.append(lambda: done.append(name))

    def run(self) -> None:
        while self.work:
            if isinstance(self.work[0], Mark) and not self.work[0].reached():
                return
            match self.work.pop(0):
                case list() as copies:
                    for to, source, bytes_ in copies:
                        ctypes.memmove(to, source, bytes_)
                case Mark():
                    pass
                case work:
                    work()


class Locks:
    """Page-locked memory by address; refuses when told to."""

    def __init__(self, refuses: bool = False) -> None:
        self.refuses = refuses
        self.held: dict[int, int] = {}

    def register(self, address: int, bytes_: int) -> None:
        if self.refuses:
            raise CudaError("cuMemHostRegister: not here")
        self.held[address] = bytes_

    def unregister(self, address: int) -> None:
        del self.held[address]


class Harness:
    """A copier over host memory and the streams of a test; pages 0 to 7 are mapped."""

    def __init__(self, refuses: bool = False) -> None:
        self.pool = host_memory(1 << 20, 64 << 10)
        self.kv = PagedKv.reserve(self.pool, SHAPE, 64, KV)
        self.kv.map_slab(0)
        self.compute, self.loads, self.saves, self.locks = Stream(), Stream(), Stream(), Locks(refuses)
        self.copier = CudaCopier(self.kv, self.locks, self.compute, self.loads, self.saves)
        self.arena = np.random.default_rng(0).integers(1, 255, 64 * SHAPE.piece_bytes).astype(np.uint8)

    def load(self, *pages: int) -> Any:
        return self.copier.load(self.arena, numbers(*(p * SHAPE.piece_bytes for p in pages)), numbers(*pages))

    def piece(self, n: int) -> np.ndarray:
        return self.arena[n * SHAPE.piece_bytes : (n + 1) * SHAPE.piece_bytes]


def numbers(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@pytest.fixture
def harness() -> Iterator[Harness]:
    made = Harness()
    yield made
    made.pool.close()


def test_compute_waits_for_the_last_load_into_its_pages_and_for_no_later_one(harness: Harness) -> None:
    done: list[str] = []
    first, second = harness.load(1, 2), harness.load(3)
    assert harness.copier.pending
    harness.copier.wait_for(numbers(0, 2))
    harness.compute.compute(done, "layer 0")
    harness.copier.wait_for(numbers(3, 5))
    harness.compute.compute(done, "layer 1")
    harness.compute.run()
    assert done == []
    later = harness.loads.work[2:]
    del harness.loads.work[2:]
    harness.loads.run()
    harness.compute.run()
    assert first.reached() and not second.reached() and done == ["layer 0"]
    harness.loads.work = later
    harness.loads.run()
    harness.compute.run()
    assert done == ["layer 0", "layer 1"] and not harness.copier.pending
    for page in (1, 2, 3):
        assert np.array_equal(harness.kv.page_bytes_view(page), harness.piece(page))


def test_compute_waits_for_nothing_that_is_loaded_for_others(harness: Harness) -> None:
    done: list[str] = []
    harness.load(1, 2)
    harness.copier.wait_for(numbers(4, 5))
    harness.compute.compute(done, "step")
    harness.compute.run()
    assert done == ["step"]


def test_a_save_follows_what_was_computed_before_it_and_ends_when_its_bytes_are_there(harness: Harness) -> None:
    harness.kv.page_bytes_view(6)[:] = 0
    harness.compute.work.append(lambda: harness.kv.page_bytes_view(6).fill(7))
    harness.copier.written()
    # a later step's, which this save need not wait for
    harness.compute.work.append(lambda: harness.kv.page_bytes_view(6).fill(9))
    later = harness.compute.work.pop()
    saving = threading.Thread(target=lambda: harness.copier.save(harness.arena, numbers(0), numbers(6)))
    saving.start()
    while len(harness.saves.work) < 3:  # its wait, its copy, its mark
        saving.join(0.001)
    harness.saves.run()
    assert saving.is_alive() and not (harness.piece(0) == 7).all(), "the page is not computed yet"
    harness.compute.run()
    harness.saves.run()
    saving.join(20)
    assert not saving.is_alive() and (harness.piece(0) == 7).all()
    later()


def test_a_page_moves_after_its_load_and_before_later_saves(harness: Harness) -> None:
    harness.load(1)
    moving = threading.Thread(target=lambda: harness.copier.move(numbers(1), numbers(5)))
    moving.start()
    while len(harness.compute.work) < 3:  # its wait, its copy, its mark
        moving.join(0.001)
    saving = threading.Thread(target=lambda: harness.copier.save(harness.arena, numbers(0), numbers(5)))
    saving.start()
    while len(harness.saves.work) < 3:
        saving.join(0.001)
    for stream in (harness.saves, harness.compute, harness.loads):  # the last one first
        assert moving.is_alive() and saving.is_alive()
        stream.run()
    for stream, thread in ((harness.compute, moving), (harness.saves, saving)):
        stream.run()
        thread.join(20)
        assert not thread.is_alive()
    assert np.array_equal(harness.kv.page_bytes_view(5), harness.piece(1))
    assert np.array_equal(harness.piece(0), harness.piece(1))


def test_the_arena_is_locked_as_a_whole_until_another_takes_its_place(harness: Harness) -> None:
    harness.copier.adopt(harness.arena)
    assert harness.locks.held == {harness.arena.ctypes.data: harness.arena.nbytes}
    other = np.zeros(SHAPE.piece_bytes, np.uint8)
    harness.copier.adopt(other)
    assert harness.locks.held == {other.ctypes.data: other.nbytes}
    harness.copier.drop()
    assert harness.locks.held == {}


def test_an_arena_that_cannot_be_locked_is_copied_from_all_the_same() -> None:
    harness = Harness(refuses=True)
    harness.copier.adopt(harness.arena)
    harness.load(1)
    harness.loads.run()
    assert np.array_equal(harness.kv.page_bytes_view(1), harness.piece(1))
    harness.pool.close()


class Link:
    """The store's side: an arena, and what it was told."""

    def __init__(self, arena: np.ndarray) -> None:
        self.arena, self.sent = arena, []  # type: ignore[var-annotated]

    def send(self, message: kvstore_pb2.WorkerToStore) -> None:
        self.sent.append(message)


def test_the_store_and_the_engine_hear_of_a_load_only_when_its_copies_have_ended(harness: Harness) -> None:
    table, inbox = LoadTable(), queue.SimpleQueue[object]()
    loader = KvLoader(harness.kv, table, inbox.put, harness.copier)
    link = Link(harness.arena)
    loader.link = link  # type: ignore[assignment]
    cache = HbmCache(PagePool(1, harness.kv.pages_per_slab, SHAPE.layers))
    session = SessionKey("t", "s")
    block = cache.new_block(0, session, range(2))
    load = Transfer.of(1, np.stack([block.pages]), hint=False)
    table.open[1] = load
    loader.start()
    loader.from_store(ArenaHere(harness.arena.data))
    loader.from_store(kvstore_pb2.LoadPieces(load_id=1, chunks=[0, 0], layers=[0, 1], offsets=[0, SHAPE.piece_bytes]))
    loader.from_store(kvstore_pb2.LoadEnd(load_id=1))
    for _ in itertools.count():
        if load.ready.all():
            break
        threading.Event().wait(0.001)
    assert harness.copier.pending and not load.closed and not link.sent, "in reach, and under way"
    harness.loads.run()
    events = [inbox.get(timeout=20)]
    while not isinstance(events[-1], LoadClosed):
        events.append(inbox.get(timeout=20))
    assert load.closed and [m.WhichOneof("kind") for m in link.sent] == ["taken"]
    assert all(isinstance(e, Wake) for e in events[:-1])
    for layer in range(2):
        assert np.array_equal(harness.kv.page_bytes_view(int(block.pages[layer])), harness.piece(layer))
    loader.stop()


def test_halting_a_load_returns_when_its_pages_are_touched_no_more(harness: Harness) -> None:
    table = LoadTable()
    loader = KvLoader(harness.kv, table, lambda event: None, harness.copier)
    load = Transfer.of(1, np.empty((0, 2), np.int64), hint=True)
    harness.load(1)
    halting = threading.Thread(target=lambda: loader.halt(load))
    halting.start()
    halting.join(0.05)
    assert halting.is_alive() and not load.closed
    harness.loads.run()
    halting.join(20)
    assert load.closed
