"""Profiles: what lies between measured points, what is refused, and for which machine the figures hold."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.errors import ConfigError
from contracts.latency_profile import LoadRate, Profile, Subject, Surface, best, decode, encode, misfit

SUBJECT = Subject("ab" * 32, "bfloat16", "A processor", 4, 2, "native")
FLAT = Surface((1, 8), (0, 1000), ((1.0, 2.0), (3.0, 5.0)))
PROFILE = Profile(
    SUBJECT, "m", 12, 4096, FLAT, FLAT, Surface((16, 256), (0, 1000), ((0.1, 0.2), (1.0, 1.5))), FLAT,
    {"dram": LoadRate(0.01, 1e9), "ssd": LoadRate(0.02, 5e8)}, {"upbeat": "0.1"}, "2026-11-21",
)  # fmt: skip

axis = st.lists(st.integers(0, 10_000), min_size=1, max_size=5, unique=True).map(sorted)
times = st.floats(0, 100, allow_nan=False)


@st.composite
def surfaces(draw: st.DrawFn) -> tuple[Surface, list[list[float]]]:
    rows, columns = draw(axis), draw(axis)
    raw = [[draw(times) for _ in columns] for _ in rows]
    return Surface.measured(rows, columns, raw), raw


@settings(deadline=None)
@given(surfaces(), st.floats(0, 30_000), st.floats(0, 30_000), st.floats(0, 5_000), st.floats(0, 5_000))
def test_more_work_never_takes_less_time_nor_any_work_a_negative_one(
    made: tuple[Surface, list[list[float]]], row: float, column: float, more_rows: float, more_columns: float
) -> None:
    surface = made[0]
    here = surface.at(row, column)
    slack = 1e-9 * max(1.0, here)
    assert here >= 0
    assert surface.at(row + more_rows, column) >= here - slack
    assert surface.at(row, column + more_columns) >= here - slack
    assert surface.at(row + more_rows, column + more_columns) >= here - slack


@settings(deadline=None)
@given(surfaces())
def test_at_its_points_a_surface_says_what_was_measured_unless_less_work_took_longer(
    made: tuple[Surface, list[list[float]]],
) -> None:
    surface, raw = made
    for i, row in enumerate(surface.rows):
        for j, column in enumerate(surface.columns):
            most = max(raw[a][b] for a in range(i + 1) for b in range(j + 1))
            assert surface.at(row, column) == most >= raw[i][j]


def test_between_and_beyond_its_points_a_surface_is_linear() -> None:
    assert FLAT.at(4.5, 0) == 2.0 and FLAT.at(1, 500) == 1.5
    assert FLAT.at(15, 0) == pytest.approx(5.0) and FLAT.at(1, 3000) == pytest.approx(4.0)
    assert FLAT.at(0, 0) == 1.0
    assert Surface((4,), (0,), ((2.0,),)).at(8, 0) == 4.0, "of a single point all of it grows"
    assert Surface((4,), (0,), ((2.0,),)).at(4, 500) == 2.0, "what a token costs is not known from none"


@settings(deadline=None)
@given(
    st.integers(1, 10**6), times, st.integers(1, 10**9), st.floats(1e-6, 100), st.floats(0, 1e10), st.floats(0, 1e10)
)
def test_a_rate_from_two_loads_is_never_negative_and_grows(
    small: int, small_s: float, more: int, large_s: float, some: float, others: float
) -> None:
    rate = LoadRate.measured(small, small_s, small + more, large_s)
    low, high = sorted((some, others))
    assert 0 <= rate.seconds(low) <= rate.seconds(high) * (1 + 1e-12)
    assert rate.seconds(0) == 0


def test_a_rate_is_the_line_through_two_loads() -> None:
    rate = LoadRate.measured(100, 0.2, 1100, 1.2)
    assert (rate.first_s, rate.bytes_per_s) == (pytest.approx(0.1), pytest.approx(1000))


def test_a_prefill_longer_than_a_step_is_several_each_after_a_longer_context() -> None:
    assert PROFILE.prefill_s(256) == 1.0
    assert PROFILE.prefill_s(512) == pytest.approx(1.0 + PROFILE.prefill_step_s.at(256, 256))
    assert PROFILE.prefill_s(0) == 0 and PROFILE.decode_s(0, 500) == 0
    assert PROFILE.load_s("dram", 1000) == pytest.approx(0.01 + 4096e3 / 1e9)
    with pytest.raises(KeyError):
        PROFILE.load_s("peer", 1)


def test_a_profile_comes_back_as_it_was_written() -> None:
    assert decode(encode(PROFILE), "here") == PROFILE


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda d: d.update(format=0), "format"),
        (lambda d: d.pop("loads"), "loads"),
        (lambda d: d["loads"].update(moon={"first_s": 0, "bytes_per_s": 1}), "moon"),
        (lambda d: d["loads"]["dram"].update(bytes_per_s=0), "bytes/s"),
        (lambda d: d["loads"]["dram"].update(bytes_per_s="fast"), "profile"),
        (lambda d: d["decode_step_s"].update(rows=[8, 1]), "ascending"),
        (lambda d: d["decode_step_s"].update(seconds=[[1.0, 2.0]]), "one row a row"),
        (lambda d: d["decode_step_s"].update(seconds=[[1.0, 0.5], [3.0, 5.0]]), "must not fall"),
        (lambda d: d["decode_step_s"].update(seconds=[[-1.0, 2.0], [3.0, 5.0]]), "not negative"),
        (lambda d: d["decode_step_s"].update(seconds=[[1.0, None], [3.0, 5.0]]), "finite"),
        (lambda d: d["subject"].update(threads="2"), "threads"),
        (lambda d: d["subject"].update(time=3), "time"),
        (lambda d: d.update(layers=None), "layers"),
        (lambda d: d.update(surprise=1), "surprise"),
    ],
)
def test_a_document_that_is_not_whole_is_refused_by_name_with_a_remedy(change: Any, named: str) -> None:
    data = json.loads(encode(PROFILE))
    change(data)
    with pytest.raises(ConfigError, match=named) as caught:
        decode(json.dumps(data), "model/profile.json")
    assert "model/profile.json" in str(caught.value) and "upbeat profile" in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{", "3"])
def test_what_is_no_document_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a profile"):
        decode(text, "x")


def test_a_profile_says_why_it_does_not_hold_elsewhere() -> None:
    elsewhere = replace(SUBJECT, threads=8, device="Another one")
    assert misfit(PROFILE, SUBJECT) == "" and best([PROFILE], SUBJECT) is PROFILE
    why = misfit(PROFILE, elsewhere)
    assert "threads is 2 there and 8 here" in why and "Another one" in why and "dtype" not in why
    assert best([PROFILE], elsewhere) is None and elsewhere.key != SUBJECT.key
    assert SUBJECT.key == Subject("ab" * 32, "bfloat16", "A processor", 4, 2, "native").key
