"""Training beside serving: the split that is chosen, when it changes, and that tokens come in time."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.worker.stepped_device import SteppedDevice
from worker.core.fit_steps import fit
from worker.core.harvest import HOLD_S, IDLE_S, RETRY_S, Harvest, Split, choose
from worker.core.predictor import Predictor

DEVICE = SteppedDevice(noise=0.02)
FIT = fit(4, DEVICE.measured())
SPLITS = [Split(pair.infer, pair.training) for pair in FIT.pairs]
WHOLE = Split(4, 0)
TARGET_S = 0.04


def latencies(batch: int, tokens: int) -> dict[Split, float]:
    predictor = Predictor(FIT)
    return {split: predictor.latency_s(*split, batch, tokens) for split in SPLITS}


def serve(harvest: Harvest, now: float, steps: int, batch: int, slow: float = 1.0, each: int = 200) -> float:
    """So many steps, each right after the other. slow: times as long as the device's. Returns the end."""
    rng = random.Random(steps)
    for _ in range(steps):
        split = harvest.plan(now, batch, batch * each, 0, TARGET_S)
        seconds = DEVICE.noisy(rng, *split, batch, batch * each) * (slow if split.training else 1.0)
        now += seconds
        harvest.stepped(now, seconds)
        harvest.validate()
    return now


# ---- the choice


@pytest.mark.parametrize("batch", [1, 8, 16, 24, 40])
def test_the_split_closest_below_the_target_is_chosen(batch: int) -> None:
    made = latencies(batch, 200 * batch)
    able = {split: seconds for split, seconds in made.items() if seconds <= TARGET_S}
    chosen = choose(Predictor(FIT), SPLITS, batch, 200 * batch, 0, TARGET_S, margin=0.0)
    if not able:
        assert chosen is None
    else:
        assert chosen is not None and able[chosen] == max(able.values())


def test_latencies_that_differ_by_less_than_predictions_err_count_as_equal() -> None:
    made = latencies(8, 1600)
    closest_s = max(seconds for seconds in made.values() if seconds * 1.1 <= TARGET_S)
    chosen = choose(Predictor(FIT), SPLITS, 8, 1600, 0, TARGET_S, margin=0.1)
    assert chosen is not None and closest_s / 1.1 <= made[chosen] <= closest_s
    others = [split for split, seconds in made.items() if closest_s / 1.1 <= seconds <= closest_s]
    assert chosen.training == max(split.training for split in others)


def test_the_margin_is_left_below_the_target() -> None:
    for batch in range(1, 64):
        chosen = choose(Predictor(FIT), SPLITS, batch, 200 * batch, 0, TARGET_S, margin=0.2)
        assert chosen is None or latencies(batch, 200 * batch)[chosen] * 1.2 <= TARGET_S


def test_of_splits_that_are_equally_quick_training_gets_more() -> None:
    made = replace(FIT, pairs=tuple(replace(p, step=FIT.solo[p.infer - 1].step) for p in FIT.pairs))
    chosen = choose(Predictor(made), [Split(1, 1), Split(1, 3), Split(1, 2)], 4, 400, 0, 1.0)
    assert chosen == Split(1, 3)


def test_where_trainings_speed_was_measured_the_quickest_is_chosen() -> None:
    fast = {Split(2, 2): 900.0, Split(3, 1): 500.0}
    pairs = [replace(p, trained_tokens_s=fast.get(Split(p.infer, p.training), 100.0)) for p in FIT.pairs]
    made = replace(FIT, pairs=tuple(pairs))
    assert choose(Predictor(made), SPLITS, 1, 100, 0, math.inf) == Split(2, 2)
    assert choose(Predictor(FIT), SPLITS, 1, 100, 0, math.inf) == Split(1, 3), "without a target all are equal"


def test_a_step_that_would_be_late_anyway_computes_alone() -> None:
    assert choose(Predictor(FIT), SPLITS, 200, 40_000, 0, TARGET_S) is None
    assert choose(Predictor(FIT), SPLITS, 4, 400, 500, TARGET_S) is None, "a long prompt too"


# ---- from step to step


def test_a_step_predicted_late_pauses_training_at_once_and_it_goes_on_at_the_next() -> None:
    harvest = Harvest(Predictor(FIT))
    split = harvest.plan(0.0, 4, 800, 0, TARGET_S)
    assert split.training
    harvest.stepped(0.03, DEVICE.seconds(*split, 4, 800))
    assert harvest.plan(0.03, 4, 800, 1000, TARGET_S) == WHOLE
    assert harvest.waits == "tokens would be late beside it"
    harvest.stepped(0.33, 0.3)
    assert harvest.plan(0.33, 4, 804, 0, TARGET_S) == split
    assert harvest.counts.paused_s == pytest.approx(0.3) and harvest.counts.changes == 1
    assert harvest.waits == ""


def test_a_split_that_holds_is_kept_for_a_while_and_a_late_one_is_left_at_once() -> None:
    harvest = Harvest(Predictor(FIT))
    heavy, light = (24, 4800), (1, 100)
    first = harvest.plan(0.0, *heavy, 0, TARGET_S)
    other = choose(Predictor(FIT), SPLITS, *light, 0, TARGET_S)
    assert first.training and other is not None and other != first
    assert harvest.plan(HOLD_S / 2, *light, 0, TARGET_S) == first
    assert harvest.plan(HOLD_S, *light, 0, TARGET_S) == other
    now_heavy = harvest.plan(HOLD_S * 1.1, *heavy, 0, TARGET_S)
    assert now_heavy == first, "it would be late"


def test_training_without_work_gives_all_units_back_and_has_its_split_again_at_once() -> None:
    harvest = Harvest(Predictor(FIT))
    split = harvest.plan(0.0, 4, 800, 0, TARGET_S)
    harvest.starved(0.01, True, "it copies weights")
    assert harvest.plan(0.02, 4, 800, 0, TARGET_S) == WHOLE and harvest.waits == "it copies weights"
    assert harvest.rest(0.02 + IDLE_S) == WHOLE
    harvest.starved(0.09, False)
    assert harvest.plan(0.09, 4, 800, 0, TARGET_S) == split
    assert harvest.counts.starved_s == pytest.approx(0.08) and harvest.counts.paused_s == 0


@pytest.mark.parametrize(("all_", "idle"), [(False, Split(1, 3)), (True, Split(0, 4))])
def test_an_idle_device_trains_after_a_little_while(all_: bool, idle: Split) -> None:
    harvest = Harvest(Predictor(FIT), idle_all=all_)
    split = harvest.plan(0.0, 30, 6000, 0, TARGET_S)
    assert harvest.rest(10.0) == split, "the step goes on"
    harvest.stepped(10.0, 0.03)
    assert harvest.rest(10.0 + IDLE_S / 2) == split
    assert harvest.rest(10.0 + IDLE_S) == idle and harvest.waits == ""
    harvest.rest(12.0)
    assert harvest.counts.idle_unit_s == pytest.approx((2 - IDLE_S) * idle.training)
    assert harvest.plan(12.0, 30, 6000, 0, TARGET_S) == split, "a request gets its units at once"


def test_a_device_that_has_served_nothing_yet_trains() -> None:
    assert Harvest(Predictor(FIT)).rest(0.0) == Split(1, 3)


def test_without_a_target_training_gets_what_there_is() -> None:
    assert Harvest(Predictor(FIT)).plan(0.0, 30, 6000, 0, 0.0) == Split(1, 3)


def test_tokens_come_in_time_although_steps_take_longer_than_measured() -> None:
    """A trainer that reads twice as much as the one that was measured."""
    harvest = Harvest(Predictor(FIT))
    now = serve(harvest, 0.0, 300, 8, slow=1.15)
    late = harvest.counts.late_beside
    serve(harvest, now, 3000, 8, slow=1.15)
    counts = harvest.counts
    assert counts.late_beside - late <= 0.01 * 3000
    learned_s = harvest.predictor.latency_s(*harvest.split, 8, 1600)
    assert learned_s == pytest.approx(1.15 * DEVICE.seconds(*harvest.split, 8, 1600), rel=0.02)
    assert counts.steps_beside > 2500


def test_steps_that_stay_late_take_units_away_and_they_are_tried_again_later_and_later() -> None:
    """One step in twenty takes four times as long beside training, which no factor can predict."""
    harvest, rng, now = Harvest(Predictor(FIT)), random.Random(2), 0.0
    limits, raised = [4], []
    for _ in range(20_000):
        split = harvest.plan(now, 8, 1600, 0, TARGET_S)
        seconds = DEVICE.noisy(rng, *split, 8, 1600) * (4 if split.training and rng.random() < 0.05 else 1)
        now += seconds
        harvest.stepped(now, seconds)
        harvest.validate()
        if harvest.limit != limits[-1]:
            limits.append(harvest.limit)
            if limits[-1] > limits[-2]:
                raised.append(now)
    counts = harvest.counts
    assert counts.backoffs >= 4 and 0 in limits and raised, limits
    assert counts.late_beside / (counts.steps_alone + counts.steps_beside) <= 0.015
    assert raised[-1] - raised[-2] > 2 * RETRY_S, "later and later"
    assert counts.steps_alone > counts.steps_beside
    assert harvest.waits == ("" if harvest.limit else "tokens were late beside it; it is tried again after a while")


def test_where_serving_alone_is_late_as_often_training_goes_on() -> None:
    harvest, rng, now = Harvest(Predictor(FIT)), random.Random(3), 0.0
    for n in range(6000):
        harvest.starved(now, n % 100 < 50)
        split = harvest.plan(now, 8, 1600, 0, TARGET_S)
        seconds = DEVICE.noisy(rng, *split, 8, 1600) * (4 if rng.random() < 0.02 else 1)
        now += seconds
        harvest.stepped(now, seconds)
    assert harvest.counts.late_alone > 30 and harvest.counts.backoffs <= 1
    assert harvest.counts.steps_beside > 2500


def test_what_training_could_have_is_known_without_a_job() -> None:
    harvest = Harvest(Predictor(FIT))
    harvest.starved(0.0, True)
    now = serve(harvest, 0.0, 8000, 1)
    assert harvest.spare == pytest.approx(0.5, abs=0.3) and harvest.counts.unit_s == 0
    serve(harvest, now, 4000, 100)
    assert harvest.spare < 0.1


def test_splits_that_were_not_measured_are_refused() -> None:
    with pytest.raises(ValueError, match="upbeat profile --corun"):
        Harvest(Predictor(FIT), [Split(2, 1), Split(5, 1)])


def test_a_step_during_which_training_still_ends_its_unit_teaches_nothing() -> None:
    harvest = Harvest(Predictor(FIT))
    harvest.stepped(0.0, 0.02)
    harvest.plan(0.0, 4, 800, 0, TARGET_S)
    harvest.stepped(0.03, 0.03)
    harvest.plan(0.03, 100, 60_000, 0, TARGET_S)
    harvest.stepped(0.2, 1.0)
    assert harvest.predictor.alone == 1.0 and harvest.split == WHOLE


class Machine(RuleBasedStateMachine):
    """Events in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.harvest, self.now, self.starved = Harvest(Predictor(FIT)), 0.0, False

    @rule(
        batch=st.integers(0, 100),
        each=st.integers(0, 1000),
        prefill=st.sampled_from([0, 0, 16, 512]),
        wait_s=st.floats(0, 2),
    )
    def plan(self, batch: int, each: int, prefill: int, wait_s: float) -> None:
        self.now += wait_s
        split = self.harvest.plan(self.now, batch, batch * each, prefill, TARGET_S)
        assert split == self.harvest.split
        if split.training:
            assert not self.starved
            predictor = self.harvest.predictor
            latency_s = predictor.latency_s(*split, batch, batch * each, prefill)
            assert latency_s * (1 + predictor.margin) <= TARGET_S, "never one that is predicted late"
        else:
            assert split == WHOLE

    @rule(seconds=st.floats(0, 1))
    def stepped(self, seconds: float) -> None:
        self.now += seconds
        self.harvest.stepped(self.now, seconds)

    @rule(wait_s=st.floats(0, 2))
    def rest(self, wait_s: float) -> None:
        self.now += wait_s
        assert not (self.starved and self.harvest.rest(self.now).training and self.harvest._resting)

    @rule(starved=st.booleans())
    def starve(self, starved: bool) -> None:
        self.harvest.starved(self.now, starved)
        self.starved = starved

    @invariant()
    def holds(self) -> None:
        self.harvest.validate()
        counts = self.harvest.counts
        assert counts.late_alone <= counts.steps_alone and counts.late_beside <= counts.steps_beside
        assert counts.paused_s + counts.starved_s <= self.now + 1e-9
        assert counts.unit_s + counts.idle_unit_s <= 3 * self.now + 1e-9


TestMachine = Machine.TestCase


def test_a_host_of_two_cores_has_one_split() -> None:
    two = fit(2, SteppedDevice(shares=2).measured())
    harvest = Harvest(Predictor(two))
    assert harvest.splits == (Split(1, 1),)
    assert harvest.plan(0.0, 4, 400, 0, TARGET_S) == Split(1, 1)
    assert harvest.plan(0.2, 60, 40_000, 0, TARGET_S) == Split(2, 0)
