"""Between loading and computing again, what is clearly sooner is chosen; nothing that is estimated to be slower ever
is."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storelink.core.load_plan import (
    BELIEVED_S,
    LoadRate,
    LoadRates,
    Missing,
    Prefill,
    Source,
    estimate_s,
    layer_load_s,
    may_start,
    plan,
)

FAST, SLOW = LoadRate(0.002, 20e-6), LoadRate(0.05, 0.01)
LAYERS = 12


def missing(count: int, source: Source = Source.DRAM) -> list[Missing]:
    return [Missing(LAYERS, source)] * count


def prefill(token_s: float, tokens: int = 50, overlap: bool = True) -> Prefill:
    return Prefill(tokens, token_s, 64, LAYERS, overlap)


def test_a_long_prompt_is_loaded_from_a_fast_tier() -> None:
    assert plan(missing(93), {Source.DRAM: FAST}, prefill(1e-3)).chunks == 93


def test_a_short_tail_is_computed_where_computing_is_faster_than_asking() -> None:
    assert plan(missing(1), {Source.DRAM: FAST}, prefill(1e-5)).chunks == 0


def test_of_a_slow_tier_as_much_is_loaded_as_arrives_while_the_rest_is_computed() -> None:
    found = plan(missing(40, Source.BLOB), {Source.BLOB: SLOW}, prefill(1e-3))
    assert 0 < found.chunks < 40
    everything, nothing = found.all_seconds, (50 + 40 * 64) * 1e-3
    assert found.seconds < 0.8 * everything and found.seconds < nothing


def test_what_lies_behind_a_slow_stretch_is_computed_even_if_it_were_near() -> None:
    mixed = [*missing(20), *missing(5, Source.BLOB), *missing(5)]
    assert plan(mixed, {Source.DRAM: FAST, Source.BLOB: LoadRate(2.0, 0.1)}, prefill(1e-4)).chunks == 20


def test_what_is_not_known_is_tried() -> None:
    assert plan(missing(3, Source.PEER), {}, prefill(1e-9)).chunks == 3


def test_only_the_first_step_of_a_prompt_hides_a_load() -> None:
    whole = prefill(1e-3, tokens=2048)
    steps, load_s = replace(whole, step_tokens=512), 0.05 + 20 * LAYERS * 0.01
    loaded = missing(20, Source.BLOB)
    assert estimate_s(loaded, 0, {Source.BLOB: SLOW}, whole) == pytest.approx(load_s + 2.048 / LAYERS)
    assert estimate_s(loaded, 0, {Source.BLOB: SLOW}, steps) == pytest.approx(load_s + 0.512 / LAYERS + 3 * 0.512)
    assert plan(loaded, {Source.BLOB: SLOW}, steps).chunks < plan(loaded, {Source.BLOB: SLOW}, whole).chunks


def test_what_the_store_says_of_its_queues_counts_and_not_what_loads_took_lately() -> None:
    lately = {Source.PEER: FAST, Source.DRAM: FAST}
    soon = [Missing(LAYERS, Source.PEER, 0.001 * k) for k in range(20)]
    queued = [Missing(LAYERS, Source.PEER, 5.0 + 0.001 * k) for k in range(20)]
    assert plan(soon, lately, prefill(1e-3)).chunks == 20
    assert plan(queued, lately, prefill(1e-3)).chunks == 0, "five seconds of others' reads come first"
    assert estimate_s(queued, 0, lately, prefill(0.0)) == pytest.approx(5.019)


def test_from_dram_on_the_ways_own_pace_counts() -> None:
    here = [Missing(LAYERS, Source.SSD, 0.0)] * 20
    assert estimate_s(here, 0, {Source.DRAM: SLOW}, prefill(0.0)) == pytest.approx(0.05 + 20 * LAYERS * 0.01)


def test_without_overlap_times_add_up() -> None:
    load_s, compute_s = 0.002 + 93 * LAYERS * 20e-6, 50e-3
    assert estimate_s(missing(93), 0, {Source.DRAM: FAST}, prefill(1e-3, overlap=False)) == pytest.approx(
        load_s + compute_s
    )
    assert estimate_s(missing(93), 0, {Source.DRAM: FAST}, prefill(1e-3)) == pytest.approx(compute_s + load_s / LAYERS)


def test_behind_other_prompts_a_slow_tier_is_loaded_while_one_waits() -> None:
    alone, queued = prefill(1e-4), replace(prefill(1e-4), queued_s=30.0)
    assert plan(missing(20, Source.BLOB), {Source.BLOB: SLOW}, alone).chunks == 0
    assert plan(missing(20, Source.BLOB), {Source.BLOB: SLOW}, queued).chunks == 20
    assert estimate_s(missing(20, Source.BLOB), 0, {Source.BLOB: SLOW}, queued) == pytest.approx(30.0 + 50e-4)


seconds = st.floats(0, 1e6) | st.sampled_from([0.0, 1e-12, 1e300])
rates = st.dictionaries(st.sampled_from(Source), st.builds(LoadRate, seconds, seconds))
stretches = st.lists(st.builds(Missing, st.integers(0, 128), st.sampled_from(Source), st.none() | seconds), max_size=40)
prefills = st.builds(
    Prefill,
    st.integers(1, 5000),
    seconds,
    st.sampled_from([16, 64]),
    st.integers(0, 128),
    st.booleans(),
    seconds,
    st.sampled_from([0, 16, 512]),
)


@settings(deadline=None)
@given(stretches, rates, prefills)
def test_no_option_is_chosen_that_is_estimated_slower(
    stretch: list[Missing], known: dict[Source, LoadRate], work: Prefill
) -> None:
    found = plan(stretch, known, work)
    options = [estimate_s(stretch[:k], len(stretch) - k, known, work) for k in range(len(stretch) + 1)]
    chosen = options[found.chunks]
    assert 0 <= found.chunks <= len(stretch)
    assert found.seconds == pytest.approx(chosen) and found.all_seconds == pytest.approx(options[-1])
    assert chosen <= options[-1] * (1 + 1e-9)
    if found.chunks < len(stretch):
        assert chosen <= min(options) * (1 + 1e-9)


@settings(deadline=None)
@given(stretches, rates, prefills, st.integers(0, 3))
def test_a_faster_tier_never_lowers_what_is_loaded_to_nothing(
    stretch: list[Missing], known: dict[Source, LoadRate], work: Prefill, which: int
) -> None:
    free = known | {source: LoadRate(0.0, 0.0) for source in Source}
    at_once = [replace(m, due_s=None) for m in stretch]
    assert plan(at_once, free, work).chunks == len(stretch)


def test_rates_follow_what_is_observed_and_are_forgotten() -> None:
    known = LoadRates()
    assert known.of(Source.SSD, 0.0) is None
    known.observed(Source.SSD, 1.0, 1.0, now=0.0)
    known.observed(Source.SSD, 0.0, -5.0, now=1.0)
    rate = known.of(Source.SSD, 2.0)
    assert rate is not None and 0 < rate.latency_s < 1 and 0 < rate.piece_s < 1
    assert known.of(Source.SSD, 2.0 + BELIEVED_S) is None and not known.believed(2.0 + BELIEVED_S)


def test_a_seed_is_believed_until_something_is_observed_and_again_when_that_is_old() -> None:
    known = LoadRates()
    known.seed(Source.DRAM, FAST)
    assert known.of(Source.DRAM, 1e9) == FAST
    known.observed(Source.DRAM, 1.0, 1.0, now=1e9)
    assert known.of(Source.DRAM, 1e9) != FAST and known.of(Source.DRAM, 2e9) == FAST


def test_a_step_starts_when_no_layer_would_be_late_by_more_than_is_allowed() -> None:
    assert not may_start(0, 12, 0.0, 1.0, late_s=9.0)
    assert may_start(12, 12, 9.0, 0.0)
    assert may_start(1, 12, 0.001, 0.002) and not may_start(1, 12, 0.002, 0.001)
    assert may_start(1, 12, 0.002, 0.001, late_s=0.011) and not may_start(1, 12, 0.002, 0.001, late_s=0.010)


def test_a_first_layer_that_came_with_the_answer_does_not_make_a_slow_tier_fast() -> None:
    rates, missing = {Source.BLOB: LoadRate(0.0, 0.5)}, [Missing(4, Source.BLOB), Missing(4, Source.BLOB)]
    assert layer_load_s(missing, rates, layers=4, ready_layers=1, elapsed_s=0.0) == pytest.approx(0.5)
    assert layer_load_s(missing, rates, layers=4, ready_layers=3, elapsed_s=3.0) == pytest.approx(1.0)
    assert layer_load_s(missing, {}, layers=4, ready_layers=2, elapsed_s=0.1) == pytest.approx(0.05), (
        "nothing is known but what came"
    )
