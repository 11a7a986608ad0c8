"""The result of README.md, from result.json and result-alone.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from telling import read, stretch, table

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
        return stretch([run["parts"][f"{part}, write-back on / off (ms; median of ratios)"][2] for run in (first, later)], ".2f")

    return f"""
`bench/returning_session_tiers/run --repetitions 5 --pairs 5`, 2026-11-21, two cores of an Intel Xeon without AMX or bfloat16 instructions, nothing
else running (`result.json`; medians, least to most in brackets); and again on 2026-11-22, since small pieces are read in a short read
and the rest (`--repetitions 7 --pairs 2 --no-peers`, `result-alone.json`; the machine was slower that day, which its `hbm` shows).

{table(("cache", "first token, ms", "times `hbm`", "wanted", "later, ms", "times `hbm`"), rows)}

In the first run `ssd warm` missed its limit; in the second **every tier keeps to its limit**. A warm file is copied from the page cache and takes about
as long as a cold one: what takes the time is work a piece in the store's and the worker's Python, which shares two cores with the threads
that compute. Write-back costs a decode step {cost("decode step, mean")} times its time in the mean,
{cost("decode step, 98th percentile")} at the 98th percentile, and a prefill {cost("prefill of 1,500 tokens")}.

**vLLM and LMCache have no figures here.** In the first run they computed in bfloat16, which that processor emulates: their time was arithmetic's
and not the cache's. They have to be measured with float32 there, or on a processor with these instructions.
"""
