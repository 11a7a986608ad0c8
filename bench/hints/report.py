"""The result in README.md, from result.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from write_figures import read, table


def change(value: float) -> str:
    return f"{100 * value:+.1f} %"


def share(row: Any) -> str:
    return f"{100 * row['share']:.0f} %"


def result() -> str:
    found = read(Path(__file__).with_name("result.json"))
    missed = [
        [share(r), f"{r['ttft_mean_s']:.3f} s", f"{r['ttft_p99_s']:.2f} s", f"{r['output_tokens_per_s']:,.0f}"]
        for r in found["missed"]
    ]
    spurious = [
        [
            users,
            share(r),
            f"{r['output_tokens_per_s']:,.0f}",
            change(r["throughput_change"]["mean"]),
            f"{r['ttft_mean_s']:.3f} s",
        ]
        for users, rows in (("640", found["spurious"]), ("1,200", found["spurious_saturated"]))
        for r in rows
    ]
    by = {(int(r["users"]), r["policy"]): r for r in found["without_hints"]}
    policies = {"sticky": "sticky", "balanced-no-hints": "balanced, no hints", "balanced": "balanced with hints"}
    without = [
        [str(users), *(f"{by[users, policy]['ttft_mean_s']:.3f} s" for policy in policies)]
        for users in sorted({n for n, _ in by})
    ]
    flood = found["flood"][-1]
    p99, p50 = (change(flood[f"others_ttft_{name}_change"]["mean"]) for name in ("p99", "p50"))
    return f"""
`bench/hints/run`, 2026-11-23 (`result.json`), TTFT and tokens/s of all users:

{table(("missed hints", "TTFT mean", "TTFT p99", "tokens/s"), missed)}

SYMPHONY's figure 19: 21.3 ms a token become 24.4 at 10 % missed, which its text calls 6 %.

{table(("users", "spurious hints per request", "tokens/s", "change", "TTFT mean"), spurious)}

SYMPHONY loses 2.1 % of throughput at 60 % (figure 20); our aim is at most 1 %. 1,200 users
load the fleet nearly fully. Spurious loads come after demand loads and use free memory. What sending them costs a peer is not simulated.

{table(("users, TTFT mean", *policies.values()), without)}

Without hints `balanced` is no worse than sticky (a test allows a hundredth).

One tenant of four sends {flood["spurious_a_request"]:.0f} spurious hints per request: the other tenants' TTFT p99 changes by {p99} (aim: at most 5 %), their
median by {p50}.
"""
