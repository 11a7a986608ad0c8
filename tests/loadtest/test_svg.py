"""Plots are whole SVG, keep inside their frame, and say their figures."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from loadtest.svg import Value, distribution_plot, line_plot, nice_ticks


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.0, 0.0037), (0.0, 7300.0), (3.0, 4.0), (0.0, 0.0)])
def test_ticks_are_round_cover_the_span_and_are_few(low: float, high: float) -> None:
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low and ticks[-1] >= high and 2 <= len(ticks) <= 8
    step = ticks[1] - ticks[0]
    assert f"{step:.0e}"[0] in "125"


def test_a_line_plot_has_a_line_a_series_and_whiskers_where_runs_differ() -> None:
    series = {"a <b>": [Value(2, 1.0, 0.5, 1.5), Value(4, 2.0, 2.0, 2.0)], "c": [Value(4, 3.0, 3.0, 3.0)], "none": []}
    drawn = line_plot("TTFT & more", "users", "s", series)
    root = ElementTree.fromstring(drawn)
    kinds = [element.tag.rpartition("}")[2] for element in root.iter()]
    assert kinds.count("polyline") == 1 and kinds.count("circle") == 3
    assert "a <b>: 1 (0.5 to 1.5) at 2" in [element.text for element in root.iter()]
    inside = [float(v) for v in re.findall(r'c[xy]="([0-9.]+)"', drawn)]
    assert all(0 <= v <= 520 for v in inside)
    higher = [float(v) for v in re.findall(r'cy="([0-9.]+)"', drawn)]
    assert higher[0] > higher[1] > higher[2], "more is higher up"


def test_a_distribution_ends_at_one_and_leaves_out_the_far_tail() -> None:
    values = [float(i) for i in range(1000)] + [1e6]
    drawn = distribution_plot("times", "s", {"a": values, "b": []})
    ElementTree.fromstring(drawn)
    assert "1e+06" not in drawn
    assert drawn.count("<polyline") == 1


def test_nothing_to_draw_is_no_plot() -> None:
    assert line_plot("t", "x", "y", {"a": []}) == "" and distribution_plot("t", "x", {}) == ""
