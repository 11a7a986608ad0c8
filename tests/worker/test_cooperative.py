"""Cooperative memory (SYMPHONY, section 3.4): hints fill free HBM, requests overwrite it for nothing, what was purged
is read again."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from contracts.convert import layers_from_bitmap
from contracts.ids import SessionKey
from contracts.memory.victim_order import Rank
from contracts.v1 import kvstore_pb2
from tests.worker.engine_harness import CHUNK, FakeStore, Harness, random_prompt, tiny_model
from worker.core.block import NO_PAGE
from worker.core.events import Queried
from worker.core.pages import Pages
from worker.memory.copier import Arena, Copier
from worker.service.metrics import WorkerMetrics

LAYERS = 4
DEMAND, PREFETCH = kvstore_pb2.DEMAND, kvstore_pb2.PREFETCH
Cold = Callable[[list[int], int], list[int]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def cold(model: Path) -> Iterator[Cold]:
    """Tokens of a run with nothing cached and nothing beside it."""
    harness = Harness(model, store=False, cache=False)
    yield lambda prompt, count: harness.run(prompt, count).tokens
    harness.close()


def conversation(seed: int, length: int = 100) -> list[int]:
    return random_prompt(random.Random(seed), length)


def remembered(model: Path, *prompts: list[int], **harness: int | bool) -> tuple[Harness, FakeStore, list[list[bytes]]]:
    """A harness whose store has these prompts' caches and whose HBM has nothing, and their keys in the store."""
    made = Harness(model, **harness)  # type: ignore[arg-type]
    store = made.store
    assert store is not None
    keys: list[list[bytes]] = []
    for n, prompt in enumerate(prompts):
        made.run(prompt, 1, session=f"p{n}")
        made.purge()
        keys.append(list(store.manifests[-1].keys))
    store.asked.clear()
    made.cache.purged.clear()
    return made, store, keys


def in_hbm(harness: Harness, keys: list[bytes]) -> list[int]:
    """Chunks in HBM, by layer."""
    return list(harness.engine.core.holds(Queried(0, tuple(keys))).layer_chunks)


def asked(store: FakeStore, load_class: int) -> list[tuple[int, list[int]]]:
    """(chunk, layers) of everything asked for in this class."""
    return [
        (i, layers_from_bitmap(c.layers, LAYERS))
        for load in store.asked
        if load.load_class == load_class
        for i, c in enumerate(load.chunks)
    ]


def until(what: Callable[[], bool]) -> None:
    waited = threading.Event()
    for _ in range(2000):
        if what():
            return
        waited.wait(0.005)
    raise AssertionError("it did not come to that")


def samples(harness: Harness) -> dict[str, float]:
    """The worker's metrics in pages, by name and label values."""
    page = harness.model.shape.piece_bytes
    return {
        ".".join([s.name.removeprefix("upbeat_worker_").removesuffix("_total"), *s.labels.values()]): s.value / page
        for family in WorkerMetrics([harness.engine]).collect()
        for s in family.samples
    }


def test_case_1_with_memory_to_spare_the_hint_brings_all_layers_and_the_request_loads_nothing(
    model: Path, cold: Cold
) -> None:
    prompt = conversation(1)
    harness, store, [keys] = remembered(model, prompt)
    assert in_hbm(harness, keys) == [0] * LAYERS
    store.hint("p0", keys)
    harness.settle()
    assert in_hbm(harness, keys) == [6] * LAYERS
    assert [layers for _, layers in asked(store, PREFETCH)] == [[layer] for layer in range(LAYERS) for _ in range(6)]
    loads, delivered = len(store.asked), store.delivered
    again = harness.run(prompt, 12, session="p0")
    assert (len(store.asked), store.delivered) == (loads, delivered), "nothing is left to load"
    assert again.cached == 96 and again.tokens == cold(prompt, 12)
    harness.settle()
    seen = samples(harness)
    assert (seen["hint_bytes.used"], seen["hint_bytes.wasted"], seen["hint_bytes.late"]) == (24, 0, 0)
    assert (seen["hit_bytes.hbm"], seen["loaded_bytes.hint"], seen["loaded_bytes.demand"]) == (24, 24, 0)
    harness.close()


def test_case_2_under_pressure_last_layers_go_for_nothing_and_only_they_are_read_again(model: Path, cold: Cold) -> None:
    prompts, newcomer = [conversation(2), conversation(3)], conversation(4, 8 * CHUNK - 2)
    harness, store, keys = remembered(model, *prompts, pages=64)
    total = harness.pool.total
    for n in range(2):
        store.hint(f"p{n}", keys[n])
        harness.settle()
    assert [in_hbm(harness, k) for k in keys] == [[6] * LAYERS] * 2
    saved, granted, loads = harness.loader.saved, store.granted, len(store.asked)
    pages = 8 * LAYERS  # the newcomer's chunks, its answer's included
    short = pages - (total - 48)
    assert 12 < short < 18, "all last layers and some of the layer before"
    assert harness.run(newcomer, 2, session="new").tokens == cold(newcomer, 2)
    harness.settle()
    gone = short - 12
    assert in_hbm(harness, keys[1]) == [6, 6, 6, 0], "the last layer of both sessions"
    assert in_hbm(harness, keys[0]) == [6, 6, 6 - gone, 0], (
        "then the one before, of the session that was hinted longer ago"
    )
    stripped = [key for key in keys[0] if harness.cache.index[key].pages[2] == NO_PAGE]
    assert stripped == keys[0][-gone:], "its latest chunks"
    assert harness.cache.purged == {Rank.ADVISED: short}
    assert harness.loader.saved - saved == 7 * LAYERS == (store.granted - granted) * LAYERS, (
        "only the newcomer's own chunks were copied"
    )
    assert all(
        load.load_class == DEMAND and not load.session.session_id.startswith("p") for load in store.asked[loads:]
    )

    for n, missing in enumerate([6 + gone, 6]):
        store.asked.clear()
        before = store.delivered
        again = harness.run(prompts[n], 12, session=f"p{n}")
        assert again.cached == 96 and again.tokens == cold(prompts[n], 12)
        assert store.delivered - before == missing == sum(len(layers) for _, layers in asked(store, DEMAND))
        assert {layer for _, layers in asked(store, DEMAND) for layer in layers} <= {2, 3}
        assert len(store.asked) == 1 and not asked(store, PREFETCH), (
            "one load, whose pieces are used layer by layer as they come"
        )
    harness.settle()
    assert samples(harness)["evicted_bytes.hbm.advised"] >= short
    harness.close()


def test_case_3_with_no_free_memory_the_cache_stays_below_and_is_read_when_the_request_comes(
    model: Path, cold: Cold
) -> None:
    prompt = conversation(5)
    harness, store, [keys] = remembered(model, prompt, pages=64, step_ms=30)
    tall = conversation(6, harness.pool.total // LAYERS * CHUNK - 40)
    running = harness.submit(tall, 40, session="running")
    until(lambda: harness.pool.free == 0)
    store.hint("p0", keys)
    until(lambda: harness.engine.core.prefetching.stalled == 1)
    assert in_hbm(harness, keys) == [0] * LAYERS and not asked(store, PREFETCH)
    request = harness.submit(prompt, 12, session="p0")
    first, again = harness.wait(running, request)
    assert first.tokens == cold(tall, 40), "what runs was not disturbed"
    assert again.cached == 96 and again.tokens == cold(prompt, 12)
    assert asked(store, DEMAND)[-6:] == [(i, list(range(LAYERS))) for i in range(6)], (
        "all layers of all chunks, from DRAM"
    )
    assert not asked(store, PREFETCH) and store.delivered == 24
    harness.settle()
    assert samples(harness)["hint_bytes.no_room"] == 24
    harness.close()


def test_a_hint_that_found_no_room_is_served_when_a_turn_ends(model: Path) -> None:
    prompt = conversation(7)
    harness, store, [keys] = remembered(model, prompt, pages=64, step_ms=30)
    running = harness.submit(conversation(8, harness.pool.total // LAYERS * CHUNK - 20), 20, session="running")
    until(lambda: harness.pool.free == 0)
    store.hint("p0", keys)
    until(lambda: harness.engine.core.prefetching.stalled == 1)
    harness.wait(running)
    harness.settle()
    assert in_hbm(harness, keys) == [6] * LAYERS, "what the ended turn left behind is unadvised and gives way"
    harness.close()


def test_a_hint_fills_what_is_free_and_no_more(model: Path) -> None:
    prompt = conversation(9)
    harness, store, [keys] = remembered(model, prompt, pages=64, step_ms=30)
    free = 10
    chunks = (harness.pool.total - free) // LAYERS
    free = harness.pool.total - chunks * LAYERS
    running = harness.submit(conversation(10, chunks * CHUNK - 30), 30, session="running")
    until(lambda: harness.pool.free == free)
    store.hint("p0", keys)
    until(lambda: harness.engine.core.prefetching.stalled == 1)
    until(lambda: len(asked(store, PREFETCH)) >= 6)
    assert (harness.pool.free, asked(store, PREFETCH)[:6]) == (0, [(i, [0]) for i in range(6)])
    assert sum(in_hbm(harness, keys)) <= free
    harness.cancel(running)
    harness.wait(running)
    harness.settle()
    assert in_hbm(harness, keys) == [6] * LAYERS
    harness.close()


def test_a_request_that_is_expected_later_gets_its_memory_later(model: Path) -> None:
    first, second = conversation(51), conversation(52)
    harness, store, keys = remembered(model, first, second)
    try:
        store.hint("p0", keys[0], arrival_s=1000.0)
        store.hint("p1", keys[1], arrival_s=0.4)
        until(lambda: in_hbm(harness, keys[1]) == [len(keys[1])] * LAYERS)  # nothing but time makes it begin
        assert in_hbm(harness, keys[0]) == [0] * LAYERS, "in DRAM until half of the time has passed"
    finally:
        harness.close()


def test_a_hint_that_never_ends_gives_way_to_a_request_that_needs_the_memory(model: Path, cold: Cold) -> None:
    prompt, tall = conversation(11), conversation(12, 14 * CHUNK - 20)
    harness, store, [keys] = remembered(model, prompt, pages=64)
    store.delay_s = 3600.0
    store.hint("p0", keys)
    until(lambda: bool(asked(store, PREFETCH)))
    assert harness.pool.free < 14 * LAYERS
    request = harness.submit(tall, 18, session="tall")
    until(lambda: store.cancelled() > 0)
    store.hurry()
    assert harness.wait(request)[0].tokens == cold(tall, 18)
    harness.settle()
    harness.close()


def test_a_running_request_grows_into_memory_that_a_hint_is_filling(model: Path, cold: Cold) -> None:
    prompt, growing = conversation(13), conversation(14, CHUNK)
    harness, store, [keys] = remembered(model, prompt, pages=28)
    request = harness.submit(growing, 60, session="growing")
    until(lambda: harness.pool.free < harness.pool.total)
    store.delay_s = 3600.0
    store.hint("p0", keys)
    until(lambda: bool(asked(store, PREFETCH)))
    assert harness.wait(request)[0].tokens == cold(growing, 60)
    assert store.cancelled(), "the hint's load was given up"
    store.hurry()
    harness.settle()
    harness.close()


def test_a_request_takes_over_what_its_hint_had_not_brought_yet(model: Path, cold: Cold) -> None:
    prompt = conversation(15)
    harness, store, [keys] = remembered(model, prompt)
    withheld = threading.Event()

    def slow(key: bytes, layer: int) -> bool:
        if layer == 2 and not withheld.is_set():
            withheld.wait(30)
        return True

    store.fault = slow
    store.hint("p0", keys)
    until(lambda: in_hbm(harness, keys) == [6, 6, 0, 0])
    request = harness.submit(prompt, 12, session="p0")
    until(lambda: store.cancelled() >= 2)
    withheld.set()
    again = harness.wait(request)[0]
    assert again.cached == 96 and again.tokens == cold(prompt, 12)
    assert asked(store, DEMAND) == [(i, [2, 3]) for i in range(6)], "what had come is used in place"
    harness.settle()
    seen = samples(harness)
    assert (seen["hint_bytes.used"], seen["hint_bytes.late"]) == (12, 12)
    harness.close()


def test_an_invalidated_hint_leaves_first_and_brings_no_more(model: Path) -> None:
    prompts = [conversation(16), conversation(17)]
    harness, store, keys = remembered(model, *prompts)
    for n in range(2):
        store.hint(f"p{n}", keys[n])
    harness.settle()
    store.invalidate("p1")
    harness.settle()
    assert harness.cache.make_room(harness.pool.free + 24, harness.executor.clock.now())
    assert [sum(in_hbm(harness, k)) for k in keys] == [24, 0]
    assert samples(harness)["hint_bytes.wasted"] == 24 == samples(harness)["evicted_bytes.hbm.dropped"]
    harness.close()


def test_spurious_hints_cost_no_request_its_memory(model: Path, cold: Cold) -> None:
    spurious, wanted = [conversation(20 + n) for n in range(3)], conversation(30)
    harness, store, keys = remembered(model, *spurious, wanted, pages=64)
    for n in (0, 3, 1, 2):
        store.hint(f"p{n}", keys[n])
        harness.settle()
    for turn in range(3):
        assert harness.run([*wanted, *range(3, 3 + turn)], 12, session="p3").tokens == cold(
            [*wanted, *range(3, 3 + turn)], 12
        )
        harness.settle()
    tall = conversation(31, harness.pool.total // LAYERS * CHUNK - 30)
    assert harness.run(tall, 20, session="tall").tokens == cold(tall, 20), "all of HBM is to be had"
    assert [sum(in_hbm(harness, k)) for k in keys] == [0, 0, 0, 0]
    harness.close()


def test_when_not_cooperative_a_hint_stops_at_dram_and_the_request_loads_layer_by_layer(
    model: Path, cold: Cold
) -> None:
    prompt = conversation(18)
    harness, store, [keys] = remembered(model, prompt, cooperative=False)
    store.hint("p0", keys)
    harness.settle()
    assert in_hbm(harness, keys) == [0] * LAYERS and not store.asked
    assert harness.cache.standings.of(SessionKey("t", "p0"), harness.executor.clock.now())[0] == Rank.ADVISED, (
        "it still ranks as hinted"
    )
    again = harness.run(prompt, 12, session="p0")
    assert again.cached == 96 and again.tokens == cold(prompt, 12) and store.delivered == 24
    harness.close()


def test_a_hint_whose_piece_is_bad_leaves_nothing_that_a_request_waits_for(model: Path, cold: Cold) -> None:
    prompt = conversation(19)
    harness, store, [keys] = remembered(model, prompt)
    store.fault = lambda key, layer: not (key == keys[3] and layer == 2)
    store.hint("p0", keys)
    harness.settle()
    store.fault = lambda key, layer: True
    again = harness.run(prompt, 12, session="p0")
    assert again.tokens == cold(prompt, 12) and again.cached == 48
    harness.settle()
    harness.close()


class HeldSaves:
    """A copier whose saves wait until they may go on."""

    def __init__(self, copier: Copier) -> None:
        self.copier, self.begun, self.go_on = copier, threading.Event(), threading.Event()
        self.load, self.settle, self.adopt = copier.load, copier.settle, copier.adopt

    def save(self, arena: Arena, offsets: Pages, pages: Pages) -> None:
        self.begun.set()
        assert self.go_on.wait(10)
        self.copier.save(arena, offsets, pages)


def test_what_a_dying_store_was_given_does_not_count_as_saved(model: Path) -> None:
    prompt = conversation(32)
    harness = Harness(model)
    assert harness.store is not None
    held = HeldSaves(harness.loader.copier)
    harness.loader.copier = held
    harness.run(prompt, 1)
    assert held.begun.wait(10)
    harness.detach()
    until(lambda: not harness.engine.core.state.store_here)
    held.go_on.set()
    harness.settle()
    assert harness.cache.index and harness.engine.core.saving.saved == 0 and harness.engine.core.saving.refused == 6
    harness.close()


def test_what_is_held_for_a_hint_makes_requests_wait_until_the_hint_ends(model: Path, cold: Cold) -> None:
    hinted, other = conversation(41, 200), conversation(42, 200)
    harness, store, [keys, _] = remembered(model, hinted, other, pages=80)
    harness.cache.hold_hinted = True
    store.hint("p0", keys)
    harness.settle()
    assert in_hbm(harness, keys) == [12] * LAYERS
    request = harness.submit(other, 8, session="p1")
    until(lambda: harness.engine.counts.waiting == 1)
    assert in_hbm(harness, keys) == [12] * LAYERS, "nothing of it made way"
    store.invalidate("p0")
    [answer] = harness.wait(request)
    assert answer.tokens == cold(other, 8) and answer.cached == 192
    harness.close()
