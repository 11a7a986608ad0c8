"""The result in README.md, from result.json."""

from __future__ import annotations

from pathlib import Path

from write_figures import read, table

COUNTED = {
    "sessions": "sessions",
    "answers": "answers",
    "exact answers": "exact",
    "identical to those without a cache": "identical",
    "with another session's fact": "leaked",
}
TIERS = {
    "found in DRAM": "dram",
    "found on the node's SSD": "ssd",
    "found on the other node": "peer",
    "found in blob": "blob",
}


def result() -> str:
    arms = read(Path(__file__).with_name("result.json"))["arms"]
    rows = [[text, *(f"{of[name]:.0f}" for of in arms.values())] for text, name in COUNTED.items()]
    rows.append(["prompt tokens cached", *(f"{100 * of['cached_share']:.1f} %" for of in arms.values())])
    rows += [
        [
            f"{text}, MiB",
            *(
                f"{of['found_bytes'][tier] / (1 << 20):.1f}" if tier in of["found_bytes"] else "0"
                for of in arms.values()
            ),
        ]
        for text, tier in TIERS.items()
    ]
    off = arms["off"]
    return f"""
`bench/needle_ladder/run`, 2026-11-21, two cores of an Intel Xeon, with the demo model of that day (`result.json`):

{table(("", *arms), rows)}

No answer changes and no fact leaks. The {off["answers"] - off["exact"]:.0f} wrong answers are the model's, identical in every arm.
"""
