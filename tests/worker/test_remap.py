"""Layers lend their memory: who lends, how much, before what else, and when it comes back."""

from __future__ import annotations

import random

import pytest

from contracts.models import ModelState
from tests.worker.virtual_device import VirtualDevice
from tests.worker.virtual_model import CHUNK, random_prompt
from worker.core.lending import Lending
from worker.core.pace import Pace
from worker.core.remap import CALM_S
from worker.core.resident import Resident

WEIGHTS = 8
QUICK_S = 1e-6


def lending(layers: int, ratio: float, most: int | None = None, prefill: float = 10.0) -> Lending:
    """A layer's copy takes `ratio` times as long as computing it in a step with one decode; a prefill, `prefill` times
    as long as such a step."""
    pace = Pace(decode_token_s=0.001 * layers)
    return Lending(layers, 1, 0.001 * ratio, 0.001 * layers * prefill, layers if most is None else most, pace)


@pytest.mark.parametrize(
    ("layers", "ratio", "one", "two"),
    [(40, 3.0, 9, 11), (24, 2.0, 7, 10), (12, 3.0, 2, 2), (24, 30.0, 0, 0), (40, 12.0, 2, 1)],
)
def test_a_computing_model_lends_what_equations_4_and_5_allow(layers: int, ratio: float, one: int, two: int) -> None:
    it = lending(layers, ratio)
    allowed = [it.slots_for(lent, 1) for lent in range(layers + 1)]
    assert allowed == [0] + [2] * two + [1] * max(one - two, 0) + [None] * (layers - max(one, two))
    assert it.active_most(1, 0.0) == max(one, two)


def test_an_idle_model_lends_what_comes_during_a_short_prefill_and_the_cap_is_kept() -> None:
    assert lending(24, 3.0, prefill=1.0).idle_most() == 8
    assert lending(24, 0.1).idle_most() == 23, "a slot stays"
    assert lending(24, 0.1, most=6).idle_most() == 6
    assert lending(24, 0.1, most=6).active_most(1, 0.0) == 6


def test_steps_that_are_slower_than_with_all_layers_here_end_it_and_are_remembered() -> None:
    it = lending(24, 0.1)
    it.change(5, 1, now=10.0)
    for _ in range(2):
        it.stepped(0.24, 0, 1, 1)  # the first steps wait for copies
    for _ in range(20):
        it.stepped(0.025, 0, 1, 1)
    assert not it.too_many(1), "4 % are not slow"
    it.stepped(0.050, 500, 1, 1)
    assert not it.too_many(1), "a step with a prompt says nothing"
    for _ in range(20):
        it.stepped(0.030, 0, 1, 1)
    assert it.too_many(1)
    it.change(4, 1, now=11.0)
    assert not it.too_many(1) and it.active_most(1, 12.0) == 4 and it.active_most(1, 60.0) > 4


def test_the_pace_with_all_layers_here_is_kept_while_layers_are_lent() -> None:
    it = lending(24, 2.0)
    it.change(6, 1, now=0.0)
    for _ in range(200):
        it.pace.stepped(0.1, 0, 1)
    assert it.slots_for(8, 1) == 2 and it.slots_for(11, 1) is None, "steps that became slow allow no more"
    it.change(0, 0, now=1.0)
    assert it.slots_for(11, 1) == 2, "with all layers here, they are the pace"


def device(models: int, slabs: int, copy_s: float, **more: object) -> VirtualDevice:
    return VirtualDevice(models, slabs, weights=WEIGHTS, copy_s=copy_s, **more)  # type: ignore[arg-type]


def prompt(seed: int, chunks: int) -> list[int]:
    return random_prompt(random.Random(seed), chunks * CHUNK)


def residents(made: VirtualDevice) -> list[Resident]:
    return list(made.residency.models.values())


def lent(made: VirtualDevice) -> list[int]:
    return [each.lending.lent for each in residents(made) if each.lending is not None]


def preempted(made: VirtualDevice) -> int:
    return sum(model.engine.core.scheduling.preemptions for model in made.models)


@pytest.mark.parametrize(("copy_s", "lends"), [(QUICK_S, True), (10.0, False)])
def test_a_lone_model_lends_to_itself_before_it_preempts_and_a_slow_link_never_lends(
    copy_s: float, lends: bool
) -> None:
    made = device(1, WEIGHTS + 16, copy_s)
    model = made.models[0]
    for n in range(4):
        model.submit(prompt(n, 2), 3 * CHUNK)
    most = 0

    def watched() -> bool:
        nonlocal most
        most = max(most, *lent(made))
        return all(each._quiet() for each in made.models)

    made.go(watched)
    model.check_answers()
    assert (most > 0) == lends and (preempted(made) == 0) == lends
    if lends:
        began = made.world.now()
        made.go(lambda: not any(lent(made)), most_s=CALM_S + 1.0)
        assert made.world.now() - began <= CALM_S + 1.0, "all came back"
    made.finish()


def test_layers_come_back_when_what_runs_fits_with_a_chunk_more_for_each() -> None:
    """Six sequences of three chunks, in slabs of a chunk, beside what others have left."""
    made = device(1, WEIGHTS + 28, QUICK_S)
    model = made.models[0]
    model.runner.step_s = 0.7
    for n in range(4):
        model.submit(prompt(n, 1), 2 * CHUNK)
    running = [model.submit(prompt(10 + n, 1), 6 * CHUNK) for n in range(6)]
    made.go(lambda: lent(made)[0] > 0)
    made.go(lambda: not lent(made)[0])
    assert max(len(model.answers[name].tokens) for name in running) <= 3 * CHUNK
    made.finish()


def test_idle_models_lend_first_the_least_urgent_and_then_the_one_used_last() -> None:
    made = device(4, 4 * WEIGHTS + 12, QUICK_S, priorities=(0, 0, 1, 0))
    for number in (2, 1, 3, 0):
        made.models[number].submit(prompt(number, 1), 2)
        made.go()
    seen = list[int]()

    def watched() -> bool:
        seen.extend(number for number, count in enumerate(lent(made)) if count and number not in seen)
        return all(each._quiet() for each in made.models)

    for n in range(6):
        made.models[0].submit(prompt(10 + n, 3), 3 * CHUNK)
    made.go(watched)
    assert seen[:1] == [2] and (len(seen) < 2 or seen[1] == 3), seen
    assert preempted(made) == 0
    made.finish()


def test_a_model_that_lent_while_idle_wakes_without_memory_and_takes_its_layers_back() -> None:
    made = device(2, 2 * WEIGHTS + 12, QUICK_S)
    a, b = made.models
    for model in (a, b):
        model.submit(prompt(1, 1), 2)
        made.go()
    for n in range(4):
        b.submit(prompt(10 + n, 3), 3 * CHUNK)
    made.go(lambda: lent(made)[0] > 0)
    name = a.submit(prompt(5, 1), 2)
    made.go(lambda: name in a.answers and bool(a.answers[name].end))
    assert residents(made)[0].state is ModelState.ACTIVE and residents(made)[0].activations == 1
    made.go(lambda: not any(lent(made)), most_s=10.0)
    made.finish()


def test_pinned_models_lend_nothing() -> None:
    made = device(1, WEIGHTS + 16, QUICK_S)
    residents(made)[0].pinned = True
    for n in range(5):
        made.models[0].submit(prompt(n, 2), 3 * CHUNK)
    made.finish()
    assert [each.lending.lendings for each in residents(made) if each.lending is not None] == [0]


def test_a_model_whose_weights_leave_lends_nothing_any_more() -> None:
    made = device(2, WEIGHTS + 16, QUICK_S, sharing="swap")
    a, b = made.models
    for n in range(4):
        a.submit(prompt(n, 3), 3 * CHUNK)
    made.go(lambda: lent(made)[0] > 0)
    b.submit(prompt(9, 1), 2)
    made.go(lambda: residents(made)[0].state is ModelState.COLD)
    assert lent(made)[0] == 0
    made.finish()
    assert residents(made)[1].activations == 1
