"""The result of README.md, from result.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from telling import read, table


def change(value: float) -> str:
    return f"{100 * value:+.1f} %"


def share(row: Any) -> str:
    return f"{100 * row['share']:.0f} %"


def result() -> str:
    found = read(Path(__file__).with_name("result.json"))
    missed = [
        [share(r), f"{r['ttft_mean_s']:.3f} s", f"{r['ttft_p99_s']:.2f} s", f"{r['output_tokens_per_s']:,.0f}"] for r in found["missed"]
    ]
    spurious = [
        [people, share(r), f"{r['output_tokens_per_s']:,.0f}", change(r["throughput_change"]["mean"]), f"{r['ttft_mean_s']:.3f} s"]
        for people, rows in (("640", found["spurious"]), ("1,200", found["spurious_saturated"]))
        for r in rows
    ]
    by = {(int(r["people"]), r["policy"]): r for r in found["without_hints"]}
    policies = {"sticky": "sticky", "balanced-no-hints": "balanced, no hints", "balanced": "balanced with hints"}
    without = [
        [str(people), *(f"{by[people, policy]['ttft_mean_s']:.3f} s" for policy in policies)] for people in sorted({n for n, _ in by})
    ]
    flood = found["flood"][-1]
    p99, p50 = (change(flood[f"others_ttft_{name}_change"]["mean"]) for name in ("p99", "p50"))
    return f"""
`bench/hints/run`, 2026-11-23 (`result.json`), TTFT and tokens a second of everybody:

{table(("missed hints", "TTFT mean", "TTFT p99", "tokens/s"), missed)}

SYMPHONY (figure 19) loses 6 % of its normalised latency at 10 % missed. What a hint saves here is the load from the SSD or a peer.

{table(("people", "spurious hints, a request", "tokens/s", "change", "TTFT mean"), spurious)}

SYMPHONY (figure 20) loses 2.1 % of its throughput at 60 %; our aim is at most 1 %. With a fixed number of people throughput moves little whatever is
done, so 1,200 people are near what the fleet can serve. What is spurious is loaded behind what requests wait for, into memory that nobody
uses. The simulator leaves out that a peer also has to send it.

{table(("people, TTFT mean", *policies.values()), without)}

Without hints a fleet is no worse than a sticky one (a test holds it there to a hundredth).

One tenant of four sends {flood["spurious_a_request"]:.0f} hints for nothing a request: the p99 of the other tenants' TTFT moves by {p99} (at most 5 % is
the aim), their median by {p50}.
"""
