"""Medians, spread, and ratios to the first target, of a comparison's runs. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

#: The summarised figures: name, path into a run's figures, unit, and whether more is better.
FIGURES: tuple[tuple[str, tuple[str, ...], str, bool], ...] = (
    ("end to end, mean", ("end_to_end_s", "mean"), "s", False),
    ("end to end, p95", ("end_to_end_s", "p95"), "s", False),
    ("TTFT, mean", ("ttft_s", "mean"), "s", False),
    ("TTFT, p95", ("ttft_s", "p95"), "s", False),
    ("TTFT of returning turns, mean", ("ttft_returning_turns_s", "mean"), "s", False),
    ("TTFT of first turns, mean", ("ttft_first_turns_s", "mean"), "s", False),
    ("TPOT, mean", ("tpot_s", "mean"), "ms", False),
    ("TPOT, p95", ("tpot_s", "p95"), "ms", False),
    ("normalised latency, mean", ("normalised_s", "mean"), "ms", False),
    ("requests/s", ("requests_per_s",), "", True),
    ("output tokens/s", ("output_tokens_per_s",), "", True),
    ("goodput, requests/s", ("goodput_per_s",), "", True),
    ("SLO attainment", ("slo_attainment",), "%", True),
    ("cached share of returning prompts", ("cached_share_returning",), "%", True),
    ("imbalance (max/mean), outstanding", ("imbalance", "outstanding"), "", False),
    ("requests", ("requests",), "count", True),
    ("failed", ("failed",), "count", False),
)


def at(figures: Mapping[str, Any], path: Sequence[str]) -> float | None:
    """The number at `path`, or None."""
    value: Any = figures
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return None if value is None or isinstance(value, bool | str | Mapping) else float(value)


def summarised(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """By figure: median, min and max over the runs that have it."""
    found = {}
    for name, path, _, _ in FIGURES:
        values = [v for run in runs if (v := at(run, path)) is not None]
        if values:
            found[name] = {
                "median": round(statistics.median(values), 6),
                "min": round(min(values), 6),
                "max": round(max(values), 6),
            }
    return found


def ratios(base: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """By figure: `other` over `base`, as median, min and max over repeats.

    Runs are paired by repeat, as both runs of a pair were measured close in time.
    """
    found = {}
    by_repeat = {run["repeat"]: run for run in base}
    for name, path, _, _ in FIGURES:
        pairs = [(at(by_repeat[run["repeat"]], path), at(run, path)) for run in other if run["repeat"] in by_repeat]
        values = [b / a for a, b in pairs if a and b is not None]
        if values:
            found[name] = {
                "median": round(statistics.median(values), 4),
                "min": round(min(values), 4),
                "max": round(max(values), 4),
            }
    return found


def interleaved(targets: Sequence[str], repeats: int) -> list[tuple[int, str]]:
    """(repeat, target) in running order: each repeat has every target once and starts with a different one."""
    order = []
    for repeat in range(repeats):
        first = repeat % len(targets) if targets else 0
        turn = [*targets[first:], *targets[:first]]
        order += [(repeat, name) for name in turn]
    return order


def shown(value: float | None, unit: str) -> str:
    """A figure formatted for tables, without its unit."""
    if value is None:
        return "-"
    if unit == "%":
        return f"{100 * value:.1f}"
    if unit == "ms":
        return f"{1000 * value:.1f}"
    return f"{value:g}" if unit == "count" else f"{value:.3f}"


def titled(name: str, unit: str) -> str:
    """A figure's name with its unit."""
    return f"{name} ({unit})" if unit not in ("", "count") else name
