"""The result in README.md, from result.json."""

from __future__ import annotations

from pathlib import Path

from write_figures import read, stretch, table

CACHES = {
    "recompute": "nowhere: recomputed",
    "unadvised": "on the other node's SSD, no advisory",
    "advised": "on the other node's SSD, advised two seconds ahead",
    "hbm": "in this node's HBM",
}


def result() -> str:
    found = read(Path(__file__).with_name("result.json"))
    rows = [
        (where, f"{of['ttft_median_s']:.2f} s", stretch(of["ttft_s"], ".2f"))
        for where, of in ((CACHES[name], found["conditions"][name]) for name in CACHES)
    ]
    return f"""
`bench/returning_session/run`, 2026-11-23, two cores of an AMD EPYC (AVX-512 BF16; `result.json`):

{table(("the cache is", "median TTFT", "range"), rows)}

With a hint TTFT is that of a cache in HBM ({found["ratios"]["advised_to_hbm"]:.2f} times), and
{1 / found["ratios"]["advised_to_recompute"]:.0f} times shorter than recomputing.
"""
