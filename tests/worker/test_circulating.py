"""Layers that share slots: the bits of a step are those with all layers in their own places, whatever happens."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.worker.layers_that_take_turns import LAYERS, change_at_random, image, nine_layers
from tests.worker.test_models_against_transformers import Bench
from worker.core.lending import circulating
from worker.models.circulating import Circulation, same_size, time_of_copy
from worker.models.filling import FillFailed, host_copy

TOKENS = list(range(3, 24))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nine_layers(tmp_path_factory.mktemp("nine"))


@pytest.fixture(params=["torch", "native"])
def bench(request: pytest.FixtureRequest, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(Bench, "computes", request.param)
    return Bench(directory)


class Steps:
    """A prompt's step, which raises once at `fails`."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.fails = bench, -1
        pages = np.arange(LAYERS * 2, dtype=np.int64).reshape(LAYERS, 2)
        self._slice = bench.cut(pages, TOKENS, 0, len(TOKENS))

    def fail(self, layer: int) -> None:
        self.fails = layer

    def __call__(self) -> torch.Tensor:
        return self.bench.runner.step([self._slice], self._before, lambda layer: None)

    def _before(self, layer: int) -> None:
        if layer == self.fails:
            self.fails = -1
            raise InterruptedError


@pytest.mark.parametrize(
    "seed", [0, 1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_lent_returning_and_loaded_layers_give_the_same_bits(bench: Bench, tmp_path: Path, seed: int) -> None:
    model, steps = bench.model, Steps(bench)
    host = image(tmp_path, model)
    circulation = Circulation(model, host, host_copy)
    change_at_random(model, bench.pool, circulation, host, steps, steps.fail, seed, rounds=60)
    assert circulation.copies > 60
    host.close()


def test_in_a_quiet_state_each_layer_in_turn_is_copied_once_a_step(bench: Bench, tmp_path: Path) -> None:
    model, step = bench.model, Steps(bench)
    host = image(tmp_path, model)
    assert same_size(model) and time_of_copy(model, host, host_copy) > 0
    circulation = Circulation(model, host, host_copy)
    for lent, slots, copied in ((3, 1, 4), (4, 2, 6), (1, 2, 2), (7, 2, 9)):
        circulation.change(lent, slots)
        step()
        step()
        wait_until(lambda: not circulation._wanted and not circulation._copying)
        before = circulation.copies
        step()
        wait_until(lambda: not circulation._wanted and not circulation._copying)
        assert circulation.copies - before == copied, "a layer that has a slot of its own stays in it"
    circulation.close()
    host.close()


def test_the_next_copy_begins_when_the_step_has_computed_the_layer_and_not_before(bench: Bench, tmp_path: Path) -> None:
    model, step, came = bench.model, Steps(bench), list[str]()
    host = image(tmp_path, model)
    reached = threading.Event()

    def mark() -> Callable[[], object]:
        came.append("computed")

        def done() -> None:
            assert reached.wait(10)
            came.append("waited")

        return done

    def copy(to: int, source: int, bytes_: int) -> None:
        came.append("copied")
        host_copy(to, source, bytes_)

    circulation = Circulation(model, host, copy, mark)
    circulation.change(1, 1)
    wait_until(lambda: came == ["copied"])
    threading.Timer(0.05, reached.set).start()
    step()
    assert came[:4] == ["copied", "computed", "waited", "copied"]
    circulation.close()
    host.close()


def test_a_copy_that_fails_is_told_to_the_step(bench: Bench, tmp_path: Path) -> None:
    host = image(tmp_path, bench.model)

    def copy(to: int, source: int, bytes_: int) -> None:
        raise OSError("no more")

    circulation = Circulation(bench.model, host, copy)
    circulation.change(2, 1)
    with pytest.raises(FillFailed, match=r"layer 0 was not copied: no more"):
        Steps(bench)()
    circulation.close()
    host.close()


def test_layers_in_circulation_are_spread_evenly() -> None:
    assert circulating(24, 7, 1) == list(range(0, 24, 3)) and circulating(24, 0, 0) == []
    for layers in range(2, 50):
        for lent in range(1, layers):
            chosen = circulating(layers, lent, 1)
            gaps = {b - a for a, b in zip(chosen, [*chosen[1:], layers], strict=True)}
            assert len(set(chosen)) == lent + 1 and max(gaps) - min(gaps) <= 1


def test_in_two_slots_a_layer_more_leaves_the_others_where_they_are_and_gaps_differ_by_a_factor_of_two() -> None:
    assert circulating(24, 2, 2) == [0, 6, 12, 18]
    for layers in range(3, 50):
        before = set[int]()
        for lent in range(1, int(0.4 * layers) - 1):
            chosen = circulating(layers, lent, 2)
            gaps = [b - a for a, b in zip(chosen, [*chosen[1:], layers], strict=True)]
            assert len(set(chosen)) == lent + 2 and before <= set(chosen)
            assert max(gaps) <= 2 * min(gaps) + 2, "a factor of two, before both are rounded to whole layers"
            before = set(chosen)


def wait_until(what: Callable[[], bool]) -> None:
    for _ in range(1000):
        if what():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not come")
