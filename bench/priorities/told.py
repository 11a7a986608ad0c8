"""The result of README.md, from result.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from telling import read, table


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

    head = ("urgent", "policy", "order", "TTFT mean, urgent / others", "TTFT p99, urgent / others", "TPOT mean, urgent / others")
    shares = (0.1, 0.3, 0.5)
    sooner = ", ".join(f"{times(share, 'urgent', 'mean'):.2f}" for share in shares)
    later = ", ".join(f"{times(share, 'others', 'mean'):.2f}" for share in shares)
    return f"""
`bench/priorities/run`, 2026-11-23 (`result.json`):

{table(head, rows)}

Urgent turns get their first token in {sooner} of the time, whatever their share; the others' mean is {later} times what it was, growing with the
share of the urgent. TPOT of the urgent hardly moves: they are admitted sooner, into fuller batches, and a simulated device does not pause
one that decodes for another. SYMPHONY (figure 21) reports gains in TPOT for both; it compares with vLLM, which recomputes every cache.
"""
