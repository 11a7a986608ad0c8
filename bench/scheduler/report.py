"""The result in README.md, from result.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from write_figures import read, table


def at(fleet: Any, per_s: int) -> Any:
    return next(of for of in fleet["at_rate"] if of["offered_per_s"] == per_s)


def result() -> str:
    found = read(Path(__file__).with_name("result.json"))
    fleets = found["fleets"]

    def row(text: str, cell: Any) -> list[str]:
        return [text, *(cell(fleet) for fleet in fleets)]

    def waits(fleet: Any, per_s: int) -> str:
        return f"{at(fleet, per_s)['p50_ms']:.1f}, {at(fleet, per_s)['p99_ms']:.1f} ms"

    rows = [
        row(
            "the core alone: a placement, median (p99)",
            lambda f: f"{f['core']['place_us_median']:.0f} ({f['core']['place_us_p99']:.0f}) us",
        ),
        row("placements a second, at most", lambda f: f"{f['most_per_s']:,.0f}"),
        row("at 500 a second: p50, p99", lambda f: waits(f, 500)),
        row("at 1,000 a second", lambda f: waits(f, 1000)),
        row("at 2,000 a second", lambda f: waits(f, 2000)),
        row("share of its core at 2,000 a second", lambda f: f"{100 * at(f, 2000)['core_share']:.0f} %"),
        row(
            "bytes a session in the directory, and in the process",
            lambda f: f"{f['core']['session_bytes']:.0f}, {f['rss_bytes_a_session']:,.0f}",
        ),
        row("fleet and sessions known after", lambda f: f"{f['joined_s']:.1f} s"),
    ]
    return f"""
`bench/scheduler/run`, 2026-11-22, two cores (`result.json`), {found["settings"]["sessions"]:,.0f} sessions:

{table(("", *(f"{fleet['nodes']:,.0f} nodes" for fleet in fleets)), rows)}

**p99 at 1,000 nodes and 2,000 a second misses its limit** ({at(fleets[-1], 2000)["p99_ms"]:.1f} ms, 5 wanted): the core is nearly saturated.
"""
