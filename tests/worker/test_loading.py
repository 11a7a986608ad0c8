"""Loads, recomputation by choice, and write-back: what is decided, what runs beside a step, and that answers stay those
of a cold run."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from storelink.core.load_plan import LoadRate, Source
from tests.worker.engine_harness import CHUNK, Harness, random_prompt, tiny_model
from worker.core.pages import Pages
from worker.devices.runner import Slice, Steps
from worker.memory.copier import Arena, Copier, UnderWay

LAYERS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def cold(model: Path) -> Iterator[Callable[[list[int], int], list[int]]]:
    harness = Harness(model, store=False, cache=False)
    yield lambda prompt, count: harness.run(prompt, count).tokens
    harness.close()


@pytest.fixture
def harness(model: Path) -> Iterator[Harness]:
    made = Harness(model)
    yield made
    made.settle()
    made.close()


Cold = Callable[[list[int], int], list[int]]


class WatchedCopier:
    """A copier that counts its saves and lets others wait for the first one."""

    def __init__(self, copier: Copier) -> None:
        self._copier, self.saves, self.saved = copier, 0, threading.Event()
        self.run_bytes = copier.run_bytes

    def adopt(self, arena: Arena) -> None:
        self._copier.adopt(arena)

    def load(self, arena: Arena, offsets: Pages, pages: Pages) -> UnderWay | None:
        return self._copier.load(arena, offsets, pages)

    def save(self, arena: Arena, offsets: Pages, pages: Pages) -> None:
        self._copier.save(arena, offsets, pages)
        self.saves += 1
        self.saved.set()

    def settle(self) -> None:
        self._copier.settle()


class WatchedRunner:
    """A runner that calls `at_layer` once a layer is computed, and `at_step` before a step."""

    def __init__(
        self, runner: Steps, at_layer: Callable[[int], None], at_step: Callable[[], None] = lambda: None
    ) -> None:
        self._runner, self._at_layer, self._at_step = runner, at_layer, at_step

    def step(
        self, slices: list[Slice], before_layer: Callable[[int], None], after_layer: Callable[[int], None]
    ) -> torch.Tensor:
        def after(layer: int) -> None:
            after_layer(layer)
            self._at_layer(layer)

        self._at_step()
        return self._runner.step(slices, before_layer, after)


def watch(
    harness: Harness, at_layer: Callable[[int], None] = lambda layer: None, at_step: Callable[[], None] = lambda: None
) -> None:
    harness.engine.stepping.runner = WatchedRunner(harness.engine.stepping.runner, at_layer, at_step)


def saved_session(harness: Harness, seed: int, tokens: int = 100) -> list[int]:
    """A prompt whose chunks are below HBM and nowhere else."""
    prompt = random_prompt(random.Random(seed), tokens)
    harness.run(prompt, 4)
    harness.purge()
    return prompt


def test_what_a_slow_tier_would_bring_later_is_computed(harness: Harness, cold: Cold) -> None:
    prompt = saved_session(harness, 1)
    assert harness.store is not None
    harness.store.source = Source.BLOB
    harness.engine.core.state.rates.seed(Source.BLOB, LoadRate(5.0, 1.0))
    harness.engine.core.pace.prefill_token_s = 1e-3  # whatever else runs here
    again = harness.run(prompt, 8)
    assert again.cached == 0 and again.tokens == cold(prompt, 8)
    assert harness.engine.core.admission.recomputed_tokens == 96 and harness.store.cancelled() == 1


def test_chunks_that_a_hint_brought_in_another_order_are_used_where_they_belong(harness: Harness, cold: Cold) -> None:
    prompt = saved_session(harness, 9)
    assert harness.store is not None
    keys = list(harness.store.chunks)
    harness.store.hint("s", keys[::-1])
    harness.settle()
    again = harness.run(prompt, 8)
    assert again.cached == 96 and again.tokens == cold(prompt, 8)
    assert [harness.cache.index[key].index for key in keys] == list(range(6))


def test_without_a_plan_whatever_is_cached_is_loaded(harness: Harness, cold: Cold) -> None:
    harness.engine.core.state.policy = replace(harness.engine.core.state.policy, load_plan=False)
    prompt = saved_session(harness, 1)
    assert harness.store is not None
    harness.store.source = Source.BLOB
    harness.engine.core.state.rates.seed(Source.DRAM, LoadRate(5.0, 1.0))
    harness.engine.core.state.rates.seed(Source.BLOB, LoadRate(5.0, 1.0))
    again = harness.run(prompt, 8)
    assert (
        again.cached == 96 and again.tokens == cold(prompt, 8) and harness.engine.core.admission.recomputed_tokens == 0
    )


def test_only_the_stretch_that_is_sooner_computed_is(harness: Harness, cold: Cold) -> None:
    prompt = saved_session(harness, 2)
    assert harness.store is not None
    harness.store.source = Source.SSD
    harness.engine.core.state.rates.seed(Source.SSD, LoadRate(0.0, 1.0))
    harness.engine.core.pace.prefill_token_s = LAYERS * 1.0 / CHUNK  # a chunk takes as long to compute as to load
    again = harness.run(prompt, 8)
    assert 0 < again.cached < 96 and again.tokens == cold(prompt, 8)
    assert harness.engine.core.admission.recomputed_tokens == 96 - again.cached


def test_a_short_tail_is_not_even_asked_for(harness: Harness, cold: Cold) -> None:
    prompt = random_prompt(random.Random(3), 100)
    harness.run(prompt, 4)
    harness.settle()
    harness.engine.core.state.rates.seed(Source.DRAM, LoadRate(1.0, 0.0))
    longer = [*prompt, *random_prompt(random.Random(4), 40)]
    assert harness.store is not None
    asked = len(harness.store.asked)
    again = harness.run(longer, 8)
    assert len(harness.store.asked) == asked and again.cached == 96 and again.tokens == cold(longer, 8)


def test_a_load_teaches_what_its_source_takes(harness: Harness) -> None:
    prompt = saved_session(harness, 5)
    assert harness.engine.core.state.rates.of(Source.DRAM, harness.executor.clock.now()) is None
    harness.run(prompt, 2)
    harness.settle()
    rate = harness.engine.core.state.rates.of(Source.DRAM, harness.executor.clock.now())
    assert rate is not None and rate.latency_s > 0 and rate.piece_s > 0
    assert harness.engine.core.admission.loaded_tokens == 96


def test_layers_go_down_while_later_ones_compute(harness: Harness, cold: Cold) -> None:
    copier = WatchedCopier(harness.loader.copier)
    harness.loader.copier = copier
    seen: list[bool] = []

    def at_layer(layer: int) -> None:
        if layer == LAYERS - 2:
            seen.append(copier.saved.wait(20))  # the step cannot end before a layer has gone down

    watch(harness, at_layer)
    prompt = random_prompt(random.Random(6), 64)
    assert harness.run(prompt, 1).tokens == cold(prompt, 1)
    harness.settle()
    assert seen == [True] and harness.store is not None and len(harness.store.chunks) == 4
    assert copier.saves == LAYERS, "a run of copies a layer, all chunks together"


def test_without_layerwise_a_step_begins_with_everything_and_nothing_of_it_goes_down_before_its_end(
    harness: Harness, cold: Cold
) -> None:
    harness.engine.core.state.policy = replace(harness.engine.core.state.policy, layerwise=False)
    copier = WatchedCopier(harness.loader.copier)
    harness.loader.copier = copier
    saves_in_step: list[int] = []
    whole: list[bool] = []

    def at_step() -> None:
        copier.saves = 0
        whole.append(
            all(block.complete for s in harness.engine.core.live.values() for block in s.blocks[: s.found or 0])
        )

    watch(harness, lambda layer: saves_in_step.append(copier.saves), at_step)
    prompt = saved_session(harness, 7)
    assert saves_in_step[:LAYERS] == [0] * LAYERS, "those of the prompt's step"
    assert harness.store is not None
    harness.store.delay_s = 0.02
    again = harness.run(prompt, 8)
    assert again.cached == 96 and again.tokens == cold(prompt, 8) and all(whole)


def test_what_a_void_step_computed_never_counts_as_saved(harness: Harness, cold: Cold) -> None:
    prompt = saved_session(harness, 8)
    store = harness.store
    assert store is not None
    spoiled, old = list(store.chunks)[2], set(store.chunks)
    store.delay_s = 0.02
    store.fault = lambda key, layer: not (key == spoiled and layer == LAYERS - 1)
    longer = [*prompt, *random_prompt(random.Random(9), 60)]
    again = harness.run(longer, 8)
    assert again.tokens == cold(longer, 8)
    harness.settle()
    pages = harness.contents()
    fresh = set(store.chunks) - old
    assert len(fresh) >= 3
    size = harness.model.shape.piece_bytes
    for key in fresh:
        for layer, slot in enumerate(store.chunks[key]):
            assert store.arena is not None and bytes(store.arena[slot * size : (slot + 1) * size]) == pages[key, layer]


def test_messages_about_pieces_are_not_believed_blindly(harness: Harness, cold: Cold) -> None:
    """Layers and chunks that were not asked for, and offsets outside of the arena, change no page."""
    prompt = saved_session(harness, 10)
    store = harness.store
    assert store is not None
    pass_on = store.to_loader

    def lie(message: object) -> None:
        if hasattr(message, "offsets") and hasattr(message, "chunks"):
            message.chunks.extend([99, 0, 1])  # type: ignore[attr-defined]
            message.layers.extend([0, 77, 1])  # type: ignore[attr-defined]
            message.offsets.extend([0, 0, 1 << 60])  # type: ignore[attr-defined]
        pass_on(message)

    store.to_loader = lie
    again = harness.run(prompt, 8)
    assert again.cached == 96 and again.tokens == cold(prompt, 8)
    assert np.all([block.complete for block in harness.cache.index.values()])


def test_a_copying_thread_that_dies_is_told(model: Path) -> None:
    harness, died = Harness(model), list[BaseException]()
    told = threading.Event()

    def crashed(error: BaseException) -> None:
        died.append(error)
        told.set()

    def save(arena: Arena, offsets: Pages, pages: Pages) -> None:
        raise RuntimeError("no copy engine")

    harness.loader.on_crash = crashed
    harness.loader.copier.save = save  # type: ignore[method-assign]
    harness.run(random_prompt(random.Random(9), 40), 2)
    assert told.wait(10) and str(died[0]) == "no copy engine"
    harness.close()
