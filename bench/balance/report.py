"""The result in README.md, from result.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from write_figures import read, table

LOADS = {
    "trace, times x 1": "trace",
    "trace, times x 0.7": "trace, times × 0.7",
    "256 users, generated": "256 users",
    "trace, 150 requests": "real, four workers",
}
NAMES = {"balanced-no-hints": "balanced, no hints"}


def row(of: Any) -> list[str]:
    peak = of["peak_to_median"]
    ttft = [f"{of[name]:.2f} s" for name in ("ttft_mean_s", "ttft_p99_s")]
    ratios = [f"{peak[name]:.2f}" for name in ("over_time", "whole_run")]
    return [
        LOADS[of["load"]],
        NAMES.get(of["policy"], of["policy"]),
        *ratios,
        *ttft,
        f"{1000 * of['tpot_mean_s']:.1f} ms",
    ]


def result() -> str:
    found = read(Path(__file__).with_name("result.json"))["rows"]
    of = {(LOADS[r["load"]], r["policy"]): r for r in found}

    def whole(load: str, policy: str) -> float:
        return of[load, policy]["peak_to_median"]["whole_run"]

    def sooner(load: str) -> float:
        return 100 * (1 - of[load, "balanced"]["ttft_mean_s"] / of[load, "sticky"]["ttft_mean_s"])

    head = ("load", "policy", "over time", "whole run", "TTFT mean", "TTFT p99", "TPOT mean")
    return f"""
`bench/balance/run --trace mooncake_conversation.jsonl`, 2026-11-23, two cores of an AMD EPYC (`result.json`):

{table(head, map(row, found))}

At 256 users our sticky fleet peaks at {whole("256 users", "sticky"):.1f} times the median (paper: 3.1), `balanced` at {whole("256 users", "balanced"):.1f}: it moves a session only if
that pays (docs/design/0021). On the trace its mean TTFT is {sooner("trace"):.0f} and
{sooner("trace, times × 0.7"):.0f} % below sticky's, thanks to its hints; without hints it equals sticky.

The real run says little about balance: {of["real, four workers", "sticky"]["peak_to_median"]["moments"]:.0f} moments, and a median below one request.
"""
