"""Predicted steps: what is fitted, how far off it is, and what steps teach."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.corun import Corun, CorunFit, Pair, Solo, StepFit
from tests.worker.stepped_device import SteppedDevice
from worker.core.fit_steps import GOOD, Measurement, errors, fit, predicted_s, step_fit
from worker.core.predictor import MARGIN, Predictor

DEVICE = SteppedDevice()
LINE = StepFit(0.001, 0.01, 1e-6)


def test_steps_that_are_a_line_are_found_again() -> None:
    steps = [Measurement(1, 0, b, b * n, LINE.seconds(b, b * n)) for b in (4, 16, 64) for n in (32, 512)]
    found = step_fit(steps)
    assert found.bends == ()
    assert (found.b0_s, found.c0_s, found.k0_s) == (pytest.approx(0.001), pytest.approx(0.01), pytest.approx(1e-6))


def test_steps_that_bend_get_a_bend_where_they_do() -> None:
    bent = StepFit(1e-5, 0.01, 1e-6, ((8.0, 0.002),))
    steps = [Measurement(1, 0, b, b * n, bent.seconds(b, b * n)) for b in (1, 4, 8, 16, 32) for n in (32, 512)]
    found = step_fit(steps)
    assert [batch for batch, _ in found.bends] == [8.0]
    assert found.seconds(24, 24 * 100) == pytest.approx(bent.seconds(24, 24 * 100))
    assert found.seconds(64, 0) == pytest.approx(bent.seconds(64, 0)), "beyond the last one, the slope goes on"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 64), st.integers(0, 2000), st.floats(1e-4, 1.0)), min_size=3, max_size=12))
def test_whatever_was_measured_more_work_never_takes_less_time(steps: list[tuple[int, int, float]]) -> None:
    measured = [Measurement(1, 0, batch, batch * n, seconds) for batch, n, seconds in steps]
    if len({m.batch for m in measured}) < 2:
        return
    found = step_fit(measured)
    for batch in range(1, 80):
        assert 0 <= found.seconds(batch, 0) <= found.seconds(batch, 100) + 1e-12
        assert found.seconds(batch, 100) <= found.seconds(batch + 1, 100) + 1e-12


def test_relative_errors_count_so_a_short_step_matters_as_a_long_one() -> None:
    """One line cannot pass through all of these: it passes near the short steps as well."""
    steps = [Measurement(1, 0, b, 0, s) for b, s in ((1, 0.001), (2, 0.002), (100, 1.0), (101, 1.2))]
    found = step_fit(steps)
    assert abs(found.seconds(1, 0) / 0.001 - 1) < 0.5


def test_a_device_with_one_slowdown_a_split_needs_the_papers_form_only() -> None:
    corun = Corun(1.6, 1.1)
    line = {share: LINE.times(4 / share) for share in (1, 2, 3, 4)}
    steps = [
        Measurement(i, t, b, b * n, line[i].seconds(b, b * n) * (corun.factor(i / 4, t / 4) if t else 1.0))
        for i in (2, 3, 4) for t in range(5 - i) for b in (4, 16, 64) for n in (64, 512)
    ]  # fmt: skip
    made = fit(4, steps)
    assert all(pair.step is None for pair in made.pairs)
    assert (made.corun.b1, made.corun.k1) == (pytest.approx(1.6), pytest.approx(1.1))
    assert errors(made, steps).worst <= GOOD


def test_a_roofline_is_predicted_within_five_percent_in_the_mean_and_ten_at_worst_on_other_steps() -> None:
    device, rng, others = replace(DEVICE, noise=0.02), random.Random(5), list[Measurement]()
    for i, t in [(p.infer, p.training) for p in fit(4, device.measured()).pairs] * 30 + [(4, 0), (1, 0)] * 50:
        batch = rng.randint(1, 64)
        tokens = batch * rng.randint(50, 600)
        others.append(Measurement(i, t, batch, tokens, device.noisy(rng, i, t, batch, tokens)))
    made = fit(4, device.measured(), others)
    assert made.solo_errors is not None and made.corun_errors is not None
    assert made.solo_errors.mean <= 0.03 and made.solo_errors.worst <= 0.1
    assert made.corun_errors.mean <= 0.05 and made.corun_errors.worst <= 0.1
    assert any(pair.step is not None for pair in made.pairs), "the paper's form misfits here"


def test_few_steps_of_a_split_scale_those_of_its_share() -> None:
    steps = [m for m in DEVICE.measured() if m.training == 0]
    few = [Measurement(2, 2, 8, 800, 2.0 * DEVICE.seconds(2, 0, 8, 800)), Measurement(3, 1, 8, 800, 0.05)]
    made = fit(4, steps + few)
    predictor = Predictor(made)
    alone_s = predictor.latency_s(2, 0, 8, 800)
    assert predictor.latency_s(2, 2, 8, 800) == pytest.approx(2.0 * alone_s, rel=0.1)
    assert predictor.latency_s(2, 2, 16, 4000) == pytest.approx(2 * predictor.latency_s(2, 0, 16, 4000), rel=0.1)


def test_a_prompt_adds_its_tokens_and_suffers_from_training_too() -> None:
    made = fit(4, DEVICE.measured())
    predictor = Predictor(made)
    more_s = predictor.latency_s(4, 0, 4, 1024, 100) - predictor.latency_s(4, 0, 4, 1024)
    assert more_s == pytest.approx(100 * DEVICE.token_s, rel=0.2)
    beside_s = predictor.latency_s(3, 1, 4, 1024, 100) - predictor.latency_s(3, 1, 4, 1024)
    assert beside_s > (predictor.latency_s(3, 0, 4, 1024, 100) - predictor.latency_s(3, 0, 4, 1024)) * 1.01
    step = Measurement(4, 0, 4, 1024, 1.0, prefill_tokens=100)
    assert predicted_s(made, step) == pytest.approx(predictor.latency_s(4, 0, 4, 1024, 100))


@pytest.mark.parametrize(
    ("steps", "named"),
    [
        ([], "4 of 4 units must be measured alone"),
        ([Measurement(4, 0, 1, 10, 0.1)], r"share 4: .*two batch sizes"),
        ([Measurement(4, 0, b, 10, 0.1) for b in (1, 2)] + [Measurement(2, 2, 1, 10, 0.1)], "2 of 4 units"),
    ],
)
def test_what_was_not_measured_is_named(steps: list[Measurement], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        fit(4, steps)


def test_a_split_without_a_fit_is_refused_with_the_remedy() -> None:
    predictor = Predictor(fit(4, [m for m in DEVICE.measured() if m.infer > 1]))
    with pytest.raises(ValueError, match=r"1 \+ 3 of 4 units; measure with `upbeat profile --corun`"):
        predictor.latency_s(1, 3, 1, 10)


def test_a_prediction_takes_less_than_five_microseconds() -> None:
    """The mean of the best round, with room for machines that are busy."""
    predictor = Predictor(fit(4, DEVICE.measured()))

    def round_s() -> float:
        began = time.perf_counter()
        for batch in range(1, 1001):
            predictor.latency_s(2, 2, batch, 50 * batch)
        return (time.perf_counter() - began) / 1000

    assert min(round_s() for _ in range(20)) < 5e-6


def test_what_has_become_slower_is_learned_apart_for_steps_alone_and_beside_training() -> None:
    predictor = Predictor(fit(4, DEVICE.measured()))
    for batch in [5, 20, 40] * 30:
        seconds = 1.3 * predictor.fit.solo[-1].step.seconds(batch, 100 * batch)
        predictor.stepped(4, 0, batch, 100 * batch, 0, seconds)
    assert predictor.alone == pytest.approx(1.3, rel=0.02) and predictor.corun == 1.0
    before_s = predictor.latency_s(2, 2, 8, 800)
    for _ in range(100):
        predictor.stepped(2, 2, 8, 800, 0, 0.8 * before_s)
    assert predictor.latency_s(2, 2, 8, 800) == pytest.approx(0.8 * before_s, rel=0.02)
    assert predictor.alone == pytest.approx(1.3, rel=0.02)


def test_prompts_that_are_slower_than_measured_do_not_change_steps_without_any() -> None:
    predictor = Predictor(fit(4, DEVICE.measured()))
    plain_s = predictor.latency_s(4, 0, 8, 800)
    for _ in range(200):
        predictor.stepped(4, 0, 8, 800, 200, plain_s + 200 * 2 * DEVICE.token_s)
    assert predictor.latency_s(4, 0, 8, 800) == plain_s
    assert predictor.latency_s(4, 0, 8, 800, 200) == pytest.approx(plain_s + 400 * DEVICE.token_s, rel=0.1)


def test_the_margin_is_what_nearly_all_steps_keep() -> None:
    predictor, rng = Predictor(fit(4, DEVICE.measured())), random.Random(1)
    assert predictor.margin == MARGIN
    beyond = []
    for _ in range(20_000):
        predicted_s = predictor.latency_s(2, 2, 8, 800)
        limit_s = predicted_s * (1 + predictor.margin)
        seconds = predicted_s * rng.lognormvariate(0.0, 0.04)
        beyond.append(seconds > limit_s)
        predictor.stepped(2, 2, 8, 800, 0, seconds)
    assert fmean(beyond[5000:]) < 0.01
    assert 0.05 < predictor.margin < 0.2, "and not much more than needed"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 64), st.integers(0, 300), st.floats(0, 100)), max_size=60))
def test_no_step_however_long_moves_it_out_of_bounds(steps: list[tuple[int, int, int, float]]) -> None:
    predictor = Predictor(fit(4, DEVICE.measured()))
    for training, batch, prefill, seconds in steps:
        predictor.stepped(2, training, batch, 100 * batch, prefill, seconds)
        predictor.validate()


def test_equation_3_never_makes_a_step_shorter() -> None:
    made = CorunFit(2, (Solo(1, LINE), Solo(2, LINE.times(0.6))), Corun(0.5, 0.5), (Pair(1, 1),))
    assert Predictor(made).latency_s(1, 1, 8, 80) == LINE.seconds(8, 80)
