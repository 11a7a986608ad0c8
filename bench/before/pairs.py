"""What is compared between two commits: commands, figures of their documents, and when enough pairs were run. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

#: A figure may be so much of what it was.
BOUND = 0.97
#: Of the intervals. They are looked at after every pair, so 95 % would be wrong more often than that.
CONFIDENCE = 0.99
#: Pairs before which nothing is decided.
LEAST = 5
_DRAWS = 4000

#: By figure, how well it does: rates as they are, times inverted, so that more is better.
Speeds = dict[str, float]


def returning(document: Mapping[str, Any]) -> Speeds:
    """Time to the first token, by condition."""
    return {name: 1 / found["ttft_median_s"] for name, found in document["conditions"].items()}


def gateway(document: Mapping[str, Any]) -> Speeds:
    """Median latency of a turn, and requests a second of the gateway's own core, by case."""
    found = {f"{row['case']}: p50": 1 / row["gateway"]["p50_ms"] for row in document["latency"]}
    found |= {f"{row['case']}, advised: p50": 1 / row["gateway, advised"]["p50_ms"] for row in document["latency"]}
    return found | {f"{row['case']}: requests a core": row["gateway"]["per_core_s"] for row in document["rate"]}


def kvstore(document: Mapping[str, Any]) -> Speeds:
    """Our rates, by question."""
    return {
        figure["question"]: figure["ours"]
        for part in document["parts"].values()
        for figure in part["figures"]
        if "ours" in figure
    }


def peers(document: Mapping[str, Any]) -> Speeds:
    """Time to the first token and end to end at each load."""
    found: Speeds = {}
    for load, point in document["targets"]["upbeat"]["points"].items():
        for name in ("ttft_s", "end_to_end_s"):
            found[f"{load}: {name.removesuffix('_s')}"] = 1 / median(run[name]["mean"] for run in point["runs"])
    return found


@dataclass(frozen=True)
class Subject:
    """A bench: its arguments, and what its document says."""

    arguments: Sequence[str]
    speeds: Callable[[Mapping[str, Any]], Speeds]


SUBJECTS = {
    "returning_session": Subject(("--quick",), returning),
    "gateway": Subject(("--quick", "--no-litellm"), gateway),
    "kvstore": Subject(("--quick", "--only", "ssd,peer,load"), kvstore),
    "peers": Subject(("--quick", "--targets", "upbeat"), peers),
}


@dataclass(frozen=True)
class Verdict:
    """The ratios of a figure, now to before: their median, its interval, and whether it is no worse (None: not
    decided)."""

    median: float
    low: float
    high: float
    no_worse: bool | None


def judge(ratios: Sequence[float], seed: int = 1) -> Verdict:
    """The median of the pairs' ratios, and its bootstrap interval."""
    values = np.asarray(ratios)
    drawn = np.random.default_rng(seed).choice(values, (_DRAWS, len(values)))
    low, high = np.quantile(np.median(drawn, axis=1), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    decided = len(ratios) >= LEAST and (low > BOUND or high < BOUND)
    return Verdict(median(ratios), float(low), float(high), bool(low > BOUND) if decided else None)


def ratios(pairs: Sequence[tuple[Speeds, Speeds]]) -> dict[str, list[float]]:
    """By figure that both sides have, now to before of each pair."""
    found: dict[str, list[float]] = {}
    for now, before in pairs:
        for name in now:
            if before.get(name):
                found.setdefault(name, []).append(now[name] / before[name])
    return found


def enough(pairs: Sequence[tuple[Speeds, Speeds]]) -> bool:
    """Whether every figure is decided."""
    found = ratios(pairs)
    return bool(found) and all(judge(of).no_worse is not None for of in found.values())
