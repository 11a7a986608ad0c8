"""The result in README.md, from result.json."""

from __future__ import annotations

from pathlib import Path

from write_figures import read, stretch, table


def result() -> str:
    found = read(Path(__file__).with_name("result.json"))
    settings, ratio, sent = found["settings"], found["ttft_p50_ratio"], sum(found["flood_hints_by_status"].values())
    seconds = settings["pairs"] * settings["window_s"]
    names = {"quiet": "without the flood", "flooded": f"with {sent / seconds:.0f} false hints a second"}
    rows = []
    for arm, name in names.items():
        of = found["figures"][arm]
        hints = [f"{of['hints_done'][done]:,.0f}" for done in ("full", "behind", "noted", "known")]
        rows.append(
            [
                name,
                f"{of['turns']:.0f}",
                f"{1000 * of['ttft_p50_s']:.1f} ms",
                f"{1000 * of['ttft_p95_s']:.1f} ms",
                *hints,
            ]
        )
    return f"""
`bench/hint_flood/run`, 2026-11-23, two cores of an AMD EPYC (`result.json`).

{table(("", "turns", "TTFT p50", "p95", "hints full", "behind", "noted", "known"), rows)}

The median of the pairs' ratios of median TTFT is **{ratio["median"]:.2f}** (range of the pairs {stretch(ratio["range"], ".2f")}; at most 1.10 wanted). {found["failed"]:.0f}
turns failed. Most of the {sent:,.0f} false hints moved nothing: their sender was no longer trusted, or the store had nothing new to do.
"""
