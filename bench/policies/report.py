"""The result in README.md, from result.json."""

from __future__ import annotations

from pathlib import Path

from write_figures import read, table

ROWS = {
    "returning turns, mean": ("ttft_returning_turns_s", "mean"),
    "returning turns, p95": ("ttft_returning_turns_s", "p95"),
    "first turns, mean": ("ttft_first_turns_s", "mean"),
    "first turns, p95": ("ttft_first_turns_s", "p95"),
    "end to end, mean": ("end_to_end_s", "mean"),
}


def result() -> str:
    found = read(Path(__file__).with_name("result.json"))
    of, load = found["policies"], found["settings"]
    rows = [[text, *(f"{figures[kind][at]:.3f} s" for figures in of.values())] for text, (kind, at) in ROWS.items()]
    rows.append(
        [
            "cached share of returning turns",
            *(f"{100 * figures['cached_share_returning']:.1f} %" for figures in of.values()),
        ]
    )
    rows.append(["TPOT, mean", *(f"{1000 * figures['tpot_s']['mean']:.1f} ms" for figures in of.values())])
    over = 100 * (of["balanced"]["ttft_first_turns_s"]["mean"] / of["sticky"]["ttft_first_turns_s"]["mean"] - 1)
    return f"""
{load["requests"]:.0f} requests of a production trace, lengths × {load["length_scale"]}, times × {load["time_scale"]}, conversations of three turns and more;
`bench/policies/run --trace mooncake_conversation.jsonl`, 2026-11-23, two cores of an AMD EPYC (AVX-512 BF16; `result.json`); one run of each
policy. TTFT unless named:

{table(("", *of), rows)}

{sum(figures["failed"] for figures in of.values()):.0f} requests failed. **Returning turns gain; the mean of first turns is {over:.0f} % over `sticky`'s** (5 % wanted).
Both nodes share two cores, so balancing gains less than on two machines.
"""
