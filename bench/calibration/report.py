"""The result in README.md, from result.json and result-earlier.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from write_figures import read, table

SHOWN = {
    "TTFT, mean": ("ttft_s", "mean", ".0f"),
    "TTFT, median": ("ttft_s", "p50", ".0f"),
    "TPOT, mean": ("tpot_s", "mean", ".1f"),
    "TPOT, median": ("tpot_s", "p50", ".1f"),
}
ARMS = ("measured", "predicted", "predicted by the profile alone")


def result() -> str:
    found = read(Path(__file__).with_name("result.json"))
    overhead, off, count = (
        found["fitted_beside_the_load"],
        found["off_by"],
        found["measured"]["all turns"]["ttft_s"]["count"],
    )

    before = read(Path(__file__).with_name("result-earlier.json"))["off_by"]
    earlier = ", ".join(f"{100 * of['TTFT']:+.1f} and {100 * of['TPOT']:+.1f} %" for of in before)

    def row(name: str, turns: str = "all turns") -> list[str]:
        of, at, spec = SHOWN[name]
        measured, predicted, alone = (found[arm][turns][of][at] for arm in ARMS)
        apart = [f"{100 * (value / measured - 1):+.1f} %" for value in (predicted, alone)]
        return [name, f"{1000 * measured:{spec}} ms", f"{1000 * predicted:{spec}} ms", *apart]

    def early(turns: str) -> Any:
        return 100 * (1 - found["predicted"][turns]["ttft_s"]["mean"] / found["measured"][turns]["ttft_s"]["mean"])

    head = (f"{count:.0f} requests, one node", "measured", "predicted", "off by", "profile alone")
    return f"""
`bench/calibration/run`, 2026-11-23, two cores of an AMD EPYC (AVX-512 BF16; `result.json`).
**TTFT {100 * off["TTFT"]:+.1f} %, TPOT {100 * off["TPOT"]:+.1f} % (15 % wanted)**.

{table(head, map(row, SHOWN))}

Overhead beside the profile: {1000 * overhead["request_s"]:.1f} ms per request, {1000 * overhead["step_s"]:.1f} ms per step, {1000 * overhead["token_s"]:.1f} ms per token of a step; prompts take
{overhead["prefill_times"]:.2f} times as long. First turns are predicted {early("first turns"):.0f} % too fast, returning ones {early("later turns"):.0f} %: under load the services
compete for the cores.

**Stability.** Three earlier runs were off by {earlier} in TTFT and TPOT (`result-earlier.json`): the machine's speed changed during one, and queues
amplify that. A run now warns if lone requests change by a tenth.
"""
