"""Measuring: what a grid may ask of a worker, and that the figures are the times that steps and loads took."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.kv import KvShape
from runtime.clock import RealClock, VirtualClock
from runtime.sections import KvSection
from storelink.ends import ArenaHere
from tests.worker.engine_harness import CHUNK, FakeStore
from tests.worker.owners import KV
from worker.core.events import StoreUp
from worker.core.hbm import HbmCache
from worker.core.pages import PagePool
from worker.devices.runner import Slice
from worker.engine.executor import Executor
from worker.link.kv_loader import KvLoader
from worker.link.loads import LoadTable
from worker.measure.loads import LoadFailed, Mover, large_chunks, new_keys, rates
from worker.measure.steps import BRIEF, Grid, Stopwatch, compute, on_free_pages
from worker.memory.device_memory import host_memory
from worker.memory.paged_kv import PagedKv

SHAPE = KvShape.of_heads(b"f" * 32, 4, 2, 16, CHUNK, "float32")


def cache_of(pages: int) -> PagedKv:
    return PagedKv.reserve(host_memory(32 << 20, 1 << 16), SHAPE, pages, KV)


class HandClock(VirtualClock):
    """Moves when it is told to, for code that waits for nothing."""

    def move(self, seconds: float) -> None:
        self._now += seconds


class Priced:
    """A runner whose layers take 1 ms a token and 1 us a token of context; all else takes 5 ms a step."""

    def __init__(self, clock: HandClock) -> None:
        self.clock = clock
        self.seen: list[list[Slice]] = []

    def step(
        self, slices: list[Slice], before_layer: Callable[[int], None], after_layer: Callable[[int], None]
    ) -> torch.Tensor:
        self.seen.append(slices)
        self.clock.move(0.005)
        for layer in range(SHAPE.layers):
            before_layer(layer)
            self.clock.move(sum(1e-3 * len(s.tokens) + 1e-6 * s.start for s in slices))
            after_layer(layer)
        return torch.empty(0)


def test_the_figures_are_the_times_that_steps_and_layers_took() -> None:
    clock = HandClock()
    runner, lines = Priced(clock), []
    grid = Grid(batches=(1, 4), contexts=(100, 1000), tokens=(8, 32), before=(0, 1000))
    found = compute(Stopwatch(runner, cache_of(64), 64, clock), grid, lines.append)
    for batch in grid.batches:
        for context in grid.contexts:
            layer = batch * (1e-3 + 1e-6 * context)
            assert found.decode_layer_s.at(batch, context) == pytest.approx(layer)
            assert found.decode_step_s.at(batch, context) == pytest.approx(0.005 + 4 * layer)
    assert found.prefill_step_s.at(32, 1000) == pytest.approx(0.005 + 4 * 0.033)
    assert len(lines) == 4 and "batch 4" in lines[1]


def test_free_pages_are_measured_on_as_far_as_there_are_any_and_given_back() -> None:
    clock, lines = HandClock(), list[str]()
    runner, kv = Priced(clock), cache_of(100)
    found = on_free_pages(runner, kv, BRIEF.within(8, 512, 4096), clock, lines.append)
    assert found.decode_step_s.at(8, 1024) == pytest.approx(0.005 + 4 * 8 * (1e-3 + 1.024e-3))
    assert found.prefill_step_s.at(128, 0) == pytest.approx(0.005 + 4 * 0.128)
    assert all(s.pages.max() < kv.slab_count * kv.pages_per_slab for slices in runner.seen for s in slices)
    assert not kv.mapped_slabs

    class Failing(Priced):
        def step(self, *given: Any) -> torch.Tensor:
            raise RuntimeError("out of order")

    with pytest.raises(RuntimeError, match="out of order"):
        on_free_pages(Failing(clock), kv, BRIEF.within(8, 512, 4096), clock, lines.append)
    assert not kv.mapped_slabs


@settings(deadline=None)
@given(st.integers(1, 80), st.integers(16, 2000), st.integers(17, 9000))
def test_a_grid_asks_nothing_that_a_worker_cannot_run(max_batch: int, step_tokens: int, max_tokens: int) -> None:
    grid = Grid().within(max_batch, step_tokens, max_tokens)
    assert grid.batches and max(grid.batches) <= max_batch
    assert grid.tokens and max(grid.tokens) <= step_tokens
    assert max(grid.contexts) + 1 <= max_tokens and max(grid.tokens) + max(grid.before) <= max_tokens


def test_sequences_have_pages_of_their_own_while_there_are_enough() -> None:
    watch = Stopwatch(Priced(HandClock()), cache_of(200), 200, HandClock())
    slices = watch.slices(5, 1, 9 * CHUNK - 1)
    pages = np.concatenate([s.pages.ravel() for s in slices])
    assert pages.shape == (5 * 4 * 9,) and len(set(pages.tolist())) == len(pages)
    many = watch.slices(50, 3, 100)
    assert all(s.pages.shape == (4, 7) and s.pages.min() >= 0 and s.pages.max() < 200 for s in many)


def test_a_long_step_is_taken_once_and_short_ones_several_times() -> None:
    clock = HandClock()
    runner = Priced(clock)
    watch = Stopwatch(runner, cache_of(64), 64, clock)
    watch.median(watch.slices(1, 1, 10), most=5, limit_s=1.0)
    assert len(runner.seen) == 6, "the first does not count"
    runner.seen.clear()
    watch.median(watch.slices(1, 500, 0), most=5, limit_s=1.0)
    assert len(runner.seen) == 1


@pytest.fixture
def store() -> Iterator[FakeStore]:
    store = FakeStore(SHAPE)
    yield store
    store.close()


@pytest.fixture
def mover(store: FakeStore) -> Iterator[Mover]:
    kv, inbox, table = cache_of(400), queue.SimpleQueue[object](), LoadTable()
    loader = KvLoader(kv, table, inbox.put)
    cache = HbmCache(PagePool(kv.slab_count, kv.pages_per_slab, SHAPE.layers))
    device = Executor(
        SHAPE, kv, cache, table, loader, RealClock(), KvSection(chunk_tokens=CHUNK), lambda tenant: bytes(32)
    )
    device.link = loader.link = store  # type: ignore[assignment]
    store.to_engine, store.to_loader = inbox.put, loader.from_store
    assert store.arena is not None
    loader.from_store(ArenaHere(store.arena.data))
    loader.start()
    inbox.put(StoreUp())
    made = Mover(device, inbox, 6)
    made.attached()
    yield made
    loader.stop()
    cache.validate()
    assert cache.pool.free == cache.pool.total, "what was measured with is given back"


def settled(store: FakeStore) -> None:
    """Wait until the store has taken in everything that it was sent."""
    waited = threading.Event()
    for _ in range(1000):
        if store.sent == store.handled:
            return
        waited.wait(0.01)
    pytest.fail("the store is stuck")


def test_what_is_saved_is_loaded_again_and_takes_time(mover: Mover, store: FakeStore) -> None:
    keys = new_keys(6)
    mover.put(keys, "one")
    settled(store)
    assert set(store.chunks) == set(keys) and store.manifests[0].keys == keys
    assert mover.load(keys) > 0 and mover.load(keys[:2]) > 0
    assert store.delivered == 8 * SHAPE.layers


def test_a_store_without_room_or_without_the_chunks_fails_the_measurement(mover: Mover, store: FakeStore) -> None:
    keys = new_keys(6)
    mover.put(keys, "one")
    settled(store)
    store.fault = lambda key, layer: layer < 2
    with pytest.raises(LoadFailed, match="did not come back"):
        mover.load(keys)
    store.refuse = lambda key: True
    with pytest.raises(LoadFailed, match="no room"):
        mover.put(new_keys(6), "two")


def test_rates_are_the_line_through_small_and_large_loads_without_the_first_round() -> None:
    times = {"near": 1.0, "far": 2.0}
    asked: list[tuple[str, int]] = []

    def loads(name: str) -> Callable[[int], float]:
        def load(chunks: int) -> float:
            asked.append((name, chunks))
            first = len([a for a in asked if a[0] == name]) <= 2
            return 99.0 if first else 0.5 + times[name] * chunks

        return load

    found = rates(SHAPE, 10, {name: loads(name) for name in times}, 3, lambda line: None)
    for name, a_chunk_s in times.items():
        assert found[name].first_s == pytest.approx(0.5)
        assert found[name].bytes_per_s == pytest.approx(SHAPE.chunk_bytes / a_chunk_s)
    assert asked[:4] == [("near", 2), ("far", 2), ("near", 10), ("far", 10)], "sources take turns"


def test_an_arena_that_is_too_small_is_named_with_what_it_needs() -> None:
    assert large_chunks(SHAPE, 25 * SHAPE.chunk_bytes) == 10
    with pytest.raises(LoadFailed, match="too small"):
        large_chunks(SHAPE, 5 * SHAPE.chunk_bytes)


def test_the_page_cache_is_asked_to_forget_files_that_are_there_and_none_that_are_not(tmp_path: Path) -> None:
    from worker.measure.loads import forget_page_cache

    (tmp_path / "a").write_bytes(b"x" * 4096)
    forget_page_cache(tmp_path)
    forget_page_cache(tmp_path / "nothing")
    assert (tmp_path / "a").read_bytes() == b"x" * 4096
