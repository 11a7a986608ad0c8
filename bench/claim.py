"""What a claim is, and how its figure follows from a result of each kind of bench. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from intervals import Estimate, of_medians, of_ratios, of_share

RETURNING, END = "ttft_returning_turns_s", "end_to_end_s"
Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Claim:
    """result: under bench/. of: the figure, a ratio or a share. bound: the claim is that the figure is below (`below`)
    or above it. command: without `--out`, which `bench/rerun.py` adds; minutes: about, on two cores.
    needs: what a fresh checkout lacks. note: what a reader must know."""

    says: str
    result: str
    of: Callable[[Document], Estimate]
    bound: float
    command: str
    minutes: int
    below: bool = True
    needs: str = ""
    note: str = ""


def sessions(ours: str, theirs: str) -> Callable[[Document], Estimate]:
    """Time to the first token of two conditions of bench/returning_session."""
    return lambda d: of_medians(d["conditions"][ours]["ttft_s"], d["conditions"][theirs]["ttft_s"], "sessions")


def arms(ours: str, theirs: str, of: str = RETURNING, at: str = "mean") -> Callable[[Document], Estimate]:
    """Of bench/pressure: two arms, paired by draw: a draw's ratio is the geometric mean of its cells, which share its
    conversations."""

    def estimate(d: Document) -> Estimate:
        logs: dict[int, list[float]] = {}
        for cell in d["cells"].values():
            other = {run["seed"]: run for run in cell[theirs]}
            for run in cell[ours]:
                if run["seed"] in other:
                    logs.setdefault(int(run["seed"]), []).append(math.log(run[of][at] / other[run["seed"]][of][at]))
        return of_ratios([math.exp(fmean(each)) for each in logs.values()], f"draws of {len(d['cells'])} cells")

    return estimate


def vllm_arms(ours: str, theirs: str) -> Callable[[Document], Estimate]:
    """Time to the first token of two arms of bench/vllm returning."""
    return lambda d: of_medians(d["arms"][ours]["ttft_ms"], d["arms"][theirs]["ttft_ms"], "turns")


def repeats(ours: str, theirs: Sequence[str], of: str, load: int = -1) -> Callable[[Document], Estimate]:
    """Of a comparison: the mean of `of` over that of the best of `theirs` in it, repeat by repeat."""

    def estimate(d: Document) -> Estimate:
        label = d["points"][load]["label"]

        def runs(name: str) -> dict[float, float]:
            return {r["repeat"]: r[of]["mean"] for r in d["targets"][name]["points"].get(label, {}).get("runs", [])}

        measured = [name for name in theirs if name in d["targets"] and runs(name)]
        if not measured:
            raise ValueError("no peer was measured")
        best = min(measured, key=lambda name: sum(runs(name).values()) / len(runs(name)))
        pairs = [value / runs(best)[repeat] for repeat, value in runs(ours).items() if repeat in runs(best)]
        return of_ratios(pairs, "repeats")

    return estimate


def cells(d: Document) -> Estimate:
    """Of bench/engine: vLLM's time over ours, every pair of every cell."""
    return of_ratios([ratio for cell in d["cells"].values() for ratio in cell["ratios"]], "pairs")


def ladder(d: Document) -> Estimate:
    """Of bench/needle_ladder: answers as without a cache, in the worst arm that has one; the arms ask the same. Answers
    of one session are not independent, so the interval is that of as many trials as there are sessions."""
    worst = min((arm for name, arm in d["arms"].items() if name != "off"), key=lambda arm: arm["identical"])
    return of_share(worst["identical"] / worst["answers"] * worst["sessions"], worst["sessions"], "sessions' answers")


def codec(name: str) -> Callable[[Document], Estimate]:
    """Of bench/codecs: greedy answers as without a codec, for the worst type of weights; both ask the same. Trials are
    conversations, as in `ladder`."""

    def estimate(d: Document) -> Estimate:
        worst = min((of[name] for of in d["greedy"].values()), key=lambda of: of["identical_to_raw_rate"])
        count = d["settings"]["conversations"]
        return of_share(worst["identical_to_raw_rate"] * count, count, "conversations' answers")

    return estimate


def lent(of: str, at: str) -> Callable[[Document], Estimate]:
    """Of bench/remap: with lent layers over recomputing, where requests wait for KV memory."""

    def estimate(d: Document) -> Estimate:
        by = {(run["arm"], run["per_s"], run["repeat"]): run[of][at] for run in d["loads"]}
        most = max(float(rate) for _, rate, _ in by)
        pairs = [(v, by["recompute", rate, n]) for (arm, rate, n), v in by.items() if arm == "remap" and rate == most]
        return of_ratios([a / b for a, b in pairs], "repeats")

    return estimate
