"""The result in README.md, from result.json and result-alone.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from write_figures import read, stretch, table

HERE = Path(__file__).parent
WANTED = {"dram": "at most 1.15", "ssd warm": "at most 1.3", "ssd cold": "at most 1.8"}


def cells(of: Any) -> list[str]:
    low, high = min(of["ttft_s"]), max(of["ttft_s"])
    return [f"{1000 * of['ttft_median_s']:,.0f} ({1000 * low:,.0f} to {1000 * high:,.0f})", f"{of['x_hbm']:.2f}"]


def result() -> str:
    first, later = (read(HERE / name) for name in ("result.json", "result-alone.json"))
    rows = [
        [f"`{name}`", *cells(of), WANTED.get(name, ""), *cells(later["conditions"][name])]
        for name, of in first["conditions"].items()
    ]  # fmt: skip

    def cost(part: str) -> str:
        return stretch(
            [run["parts"][f"{part}, write-back on / off (ms; median of ratios)"][2] for run in (first, later)], ".2f"
        )

    return f"""
`bench/returning_session_tiers/run --repetitions 5 --pairs 5`, 2026-11-21, two cores of an Intel Xeon without AMX or bfloat16 instructions
(`result.json`; medians, range in brackets). Later: 2026-11-22, on a slower machine (`--repetitions 7 --pairs 2 --no-peers`, `result-alone.json`).

{table(("cache", "first token, ms", "times `hbm`", "wanted", "later, ms", "times `hbm`"), rows)}

**Every tier meets its limit in the later run**; `ssd warm` missed it in the first. Python work per piece
dominates, so warm and cold files take about as long. Write-back costs a decode step {cost("decode step, mean")} times its time in the mean,
{cost("decode step, 98th percentile")} at the 98th percentile, and a prefill {cost("prefill of 1,500 tokens")}.

**vLLM and LMCache have no figures yet.** In the first run they emulated bfloat16, so compute hid the cache.
"""
