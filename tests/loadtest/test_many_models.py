"""Generated traces of many models have the published statistics of the traces that they are fitted to."""

from __future__ import annotations

from itertools import pairwise
from statistics import mean, median

import pytest

from loadtest.many_models import PROFILES, generate, multiplied
from loadtest.model_statistics import ModelStatistics, statistics
from loadtest.traces import TraceRequest

DAY_S, HOUR_S = 86_400.0, 3600.0
SEEDS = (1, 2, 3)
#: Prism, section 3.1 and A.1: changes of the active set per hour of Novita, the fewest of four traces, and of
#: Arena-Chat, the most; and per model.
FEWEST, MOST = 54, 766
FEWEST_EACH, MOST_EACH = 54 / 16, 766 / 84


def trace(times: dict[str, list[float]]) -> list[TraceRequest]:
    return [TraceRequest(at, 100, 10, (n,), model=m) for m, each in times.items() for n, at in enumerate(each)]


@pytest.fixture(scope="module", params=[(like, seed) for like in PROFILES for seed in SEEDS[:2]], ids=str)
def two_days(request: pytest.FixtureRequest) -> tuple[str, ModelStatistics]:
    """A published trace's number of models for two days."""
    like, seed = request.param
    models = PROFILES[like].models
    return like, statistics(generate(models, 2 * DAY_S, seed, like), 2 * DAY_S, models)


def test_part_of_the_models_is_active_at_a_time(two_days: tuple[str, ModelStatistics]) -> None:
    _, found = two_days
    assert 0.23 <= found.active_share <= 0.50


def test_the_active_set_changes_as_often_as_published(two_days: tuple[str, ModelStatistics]) -> None:
    like, found = two_days
    # Hyperbolic's number is not published; it lies between the two others.
    low, high = {"novita": (0.85 * FEWEST, 1.15 * FEWEST), "arena": (0.85 * MOST, 1.15 * MOST)}.get(
        like, (FEWEST, MOST)
    )
    assert low <= found.switches_per_hour <= high


def test_models_are_idle_most_of_the_time(two_days: tuple[str, ModelStatistics]) -> None:
    _, found = two_days
    assert found.idle_share > 0.70


def test_models_have_many_idle_intervals(two_days: tuple[str, ModelStatistics]) -> None:
    like, found = two_days
    # Published of Hyperbolic and Novita only.
    assert like == "arena" or 40 <= mean(found.idle_per_hour) <= 100


def test_rates_vary_more_than_their_mean(two_days: tuple[str, ModelStatistics]) -> None:
    like, found = two_days
    assert median(found.variation) > (0.5 if like == "arena" else 1.0)


def test_one_day_says_nothing_about_the_next(two_days: tuple[str, ModelStatistics]) -> None:
    like, found = two_days
    assert len(found.correlation) == PROFILES[like].models
    assert abs(mean(found.correlation)) < 0.05
    assert max(map(abs, found.correlation)) < 0.35


@pytest.mark.parametrize(("models", "hours"), [(6, 24), (18, 12), (58, 6)])
@pytest.mark.parametrize("seed", [SEEDS[0], *(pytest.param(seed, marks=pytest.mark.slow) for seed in SEEDS[1:])])
@pytest.mark.parametrize("like", PROFILES)
def test_other_numbers_of_models_behave_alike(like: str, seed: int, models: int, hours: int) -> None:
    found = statistics(generate(models, hours * HOUR_S, seed, like), hours * HOUR_S, models)
    assert 0.23 <= found.active_share <= 0.50
    assert 0.85 * FEWEST_EACH <= found.switches_per_hour / models <= 1.15 * MOST_EACH
    assert found.idle_share > 0.70
    assert median(found.variation) > (0.5 if like == "arena" else 1.0)
    if like != "arena":
        assert 40 <= mean(found.idle_per_hour) <= 100


def test_some_models_are_persistent_and_groups_begin_together() -> None:
    requests = generate(8, DAY_S, 1, "hyperbolic")
    times = {name: [r.arrival_s for r in requests if r.model == name] for name in sorted({r.model for r in requests})}
    assert list(times) == [f"m{n:02d}" for n in range(8)]
    present = {name: len({int(at // 120) for at in each}) for name, each in times.items()}
    assert present["m00"] > 1.5 * max(present[name] for name in present if name != "m00")
    begins = {name: {int(b // 90) for a, b in pairwise(each) if b - a > 300} for name, each in times.items()}

    def together(a: str, b: str) -> float:
        return len(begins[a] & begins[b]) / len(begins[a])

    # m01 to m04 are a group, m05 to m07 are another.
    assert together("m01", "m02") > 2 * together("m01", "m06")


def test_a_seed_makes_one_trace() -> None:
    assert generate(6, HOUR_S, 1, "novita") == generate(6, HOUR_S, 1, "novita")
    assert generate(6, HOUR_S, 1, "novita") != generate(6, HOUR_S, 2, "novita")


def test_a_longer_trace_begins_with_the_shorter_one() -> None:
    shorter, longer = generate(6, HOUR_S, 1), generate(6, 2 * HOUR_S, 1)
    assert longer[: len(shorter)] == shorter and len(longer) > len(shorter)


def test_requests_are_in_order_within_the_time_and_of_positive_length() -> None:
    requests = generate(12, HOUR_S, 3, "arena", mean_prompt_tokens=300, mean_answer_tokens=60)
    arrivals = [r.arrival_s for r in requests]
    assert arrivals == sorted(arrivals) and arrivals[0] >= 0 and arrivals[-1] < HOUR_S
    assert all(r.input_tokens >= 8 and r.output_tokens >= 2 for r in requests)
    assert len({r.block_ids for r in requests}) == len(requests), "prompts share blocks"


def test_lengths_have_the_asked_means() -> None:
    requests = generate(24, DAY_S, 1, mean_prompt_tokens=300, mean_answer_tokens=60)
    assert mean(r.input_tokens for r in requests) == pytest.approx(300, rel=0.05)
    assert mean(r.output_tokens for r in requests) == pytest.approx(60, rel=0.05)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"models": 0}, "models"),
        ({"models": 1001}, "models"),
        ({"seconds": 0.0}, "seconds"),
        ({"seconds": float("nan")}, "seconds"),
        ({"like": "other"}, "hyperbolic, novita, arena"),
        ({"mean_prompt_tokens": -1.0}, "mean_prompt_tokens"),
        ({"mean_answer_tokens": float("inf")}, "mean_answer_tokens"),
    ],
)
def test_a_wrong_argument_is_named(wrong: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        generate(**({"models": 4, "seconds": 60.0, "seed": 1} | wrong))  # type: ignore[arg-type]


@pytest.mark.parametrize("factor", [0.4, 1.0, 2.5])
def test_a_multiplied_trace_keeps_its_pattern(factor: float) -> None:
    requests = generate(8, DAY_S, 1)
    made = multiplied(requests, factor, 1)
    assert abs(len(made) - factor * len(requests)) <= 1
    assert [r.arrival_s for r in made] == sorted(r.arrival_s for r in made)
    assert len({r.block_ids for r in made}) == len(made)
    before, after = statistics(requests, DAY_S + 1), statistics(made, DAY_S + 1)
    assert after.active_share == pytest.approx(before.active_share, rel=0.15)
    with pytest.raises(ValueError, match="factor"):
        multiplied(requests, 0.0, 1)


def test_a_model_is_active_for_two_minutes_after_a_request() -> None:
    found = statistics(trace({"a": [0.0, 100.0, 1000.0], "b": [500.0]}), 1200.0, models=4)
    assert found.active_share == pytest.approx((220 + 120 + 120) / 1200 / 4)
    assert found.switches_per_hour == pytest.approx(3 * (2 + 2 + 2))


def test_idle_intervals_are_those_of_more_than_ten_seconds() -> None:
    found = statistics(trace({"a": [0.0, 5.0, 15.0, 26.0], "b": [3600.0]}), 3600.0)
    assert found.idle_per_hour == (2, 1)  # from 15 to 26, and to the end
    assert found.idle_share == pytest.approx(((11 + 3574) + 3600) / 3600 / 2)
    silent = statistics(trace({"a": [0.0]}), 3600.0, models=2)
    assert silent.idle_share == pytest.approx(1.0) and silent.active_share == pytest.approx(120 / 3600 / 2)


def test_variation_is_of_requests_a_minute() -> None:
    assert statistics(trace({"a": [1.0, 61.0, 121.0]}), 180.0).variation == (0.0,)
    assert statistics(trace({"a": [1.0, 2.0, 3.0]}), 180.0).variation == pytest.approx((2**0.5,))


def test_correlation_is_of_the_same_time_on_consecutive_days() -> None:
    day = [100.0 + 700 * n**1.5 for n in range(20)]
    again = trace({"a": day + [DAY_S + at for at in day]})
    assert statistics(again, 2 * DAY_S).correlation == pytest.approx((1.0,))
    assert statistics(again, 2 * DAY_S - 1).correlation == ()
    later = trace({"a": day + [DAY_S + 43_200 + 0.3 * at for at in day]})
    assert abs(statistics(later, 2 * DAY_S).correlation[0]) < 0.2


def test_an_impossible_trace_is_refused() -> None:
    one = trace({"a": [5.0]})
    with pytest.raises(ValueError, match="no requests"):
        statistics([])
    with pytest.raises(ValueError, match="span_s"):
        statistics(one, 4.0)
    with pytest.raises(ValueError, match="models"):
        statistics(one, 6.0, 0)
