"""bench/before: what it reads of other benches' documents, and when it has decided."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.before.pairs import LEAST, SUBJECTS, enough, judge, ratios

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.parametrize("name", ["returning_session", "kvstore", "peers"])
def test_figures_of_a_real_document_are_read_and_equal_ones_have_the_ratio_1(name: str) -> None:
    speeds = SUBJECTS[name].speeds(json.loads((BENCH / name / "result.json").read_text()))
    assert len(speeds) >= 3 and all(speed > 0 for speed in speeds.values())
    assert set(map(tuple, ratios([(speeds, speeds)]).values())) == {(1.0,)}


def test_shorter_times_and_higher_rates_are_better() -> None:
    row = {"case": "short", "gateway": {"p50_ms": 2.0}, "gateway, advised": {"p50_ms": 4.0}}
    rate = {"case": "short", "gateway": {"per_core_s": 50}}
    assert SUBJECTS["gateway"].speeds({"latency": [row], "rate": [rate]}) == {
        "short: p50": 0.5,
        "short, advised: p50": 0.25,
        "short: requests a core": 50,
    }


@pytest.mark.parametrize(
    ("around", "said"), [(1.0, True), (0.9, False), (0.97, None)], ids=["no worse", "worse", "at the bound"]
)
def test_a_figure_is_decided_once_its_interval_excludes_the_bound(around: float, said: bool | None) -> None:
    measured = [around * factor for factor in (0.99, 1.01, 1.0, 0.995, 1.005, 1.002)]
    assert judge(measured).no_worse is said
    assert judge(measured[: LEAST - 1]).no_worse is None
    assert enough([({"a": r}, {"a": 1.0}) for r in measured]) is (said is not None)


def test_a_figure_that_only_one_side_has_is_not_compared() -> None:
    assert ratios([({"old and new": 2.0, "new": 1.0}, {"old and new": 1.0, "old": 1.0})]) == {"old and new": [2.0]}
