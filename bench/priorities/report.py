"""The result in README.md, from result.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from write_figures import read, table


def pair(of: Any, name: str, at: str, times: float, spec: str, unit: str) -> str:
    return f"{times * of['urgent'][name][at]:{spec}} / {times * of['others'][name][at]:{spec}} {unit}"


def result() -> str:
    found = read(Path(__file__).with_name("result.json"))["rows"]
    shown = [r for r in found if r["policy"] == "balanced" or r["order"] == "priority"]
    rows = [
        [
            f"{100 * r['urgent_share']:.0f} %", r["policy"], r["order"],
            pair(r, "ttft_s", "mean", 1, ".3f", "s"), pair(r, "ttft_s", "p99", 1, ".2f", "s"), pair(r, "tpot_s", "mean", 1000, ".1f", "ms"),
        ]
        for r in shown
    ]  # fmt: skip
    of = {(round(float(r["urgent_share"]), 1), r["order"]): r for r in found if r["policy"] == "balanced"}

    def times(share: float, whose: str, at: str) -> Any:
        return of[share, "priority"][whose]["ttft_s"][at] / of[share, "first come"][whose]["ttft_s"][at]

    head = (
        "urgent",
        "policy",
        "order",
        "TTFT mean, urgent / others",
        "TTFT p99, urgent / others",
        "TPOT mean, urgent / others",
    )
    shares = (0.1, 0.3, 0.5)
    sooner = ", ".join(f"{times(share, 'urgent', 'mean'):.2f}" for share in shares)
    later = ", ".join(f"{times(share, 'others', 'mean'):.2f}" for share in shares)
    return f"""
`bench/priorities/run`, 2026-11-23 (`result.json`):

{table(head, rows)}

With priorities, mean TTFT of urgent turns is {sooner} times that of first come; the others' is {later} times, growing with the urgent share. TPOT hardly
changes. SYMPHONY (figure 21) reports TPOT gains for both, over vLLM, which recomputes every cache.
"""
