"""What the parts of the report share: results by figure, rows by load and system, and tables of ratios."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from write_figures import read, table

HERE = Path(__file__).parent
E2E, TPOT, TTFT = "end_to_end_s", "tpot_s", "ttft_s"
TITLES = {E2E: "end to end", TPOT: "TPOT", TTFT: "TTFT"}
NAMES = {
    "recompute": "vLLM",
    "prefix-caching": "vLLM, prefix caching",
    "infercept": "InferCept",
    "infercept-ssd": "InferCept, SSD",
    "llumnix": "Llumnix",
    "llumnix-infercept": "Llumnix + InferCept",
    "lmcache-ssd": "LMCache, SSD",
    "sticky": "ours, sticky, no hints",
    "sticky-hints": "ours, sticky",
    "balanced-no-hints": "ours, no hints",
    "balanced": "ours",
}
OTHERS = ("recompute", "infercept", "llumnix", "llumnix-infercept")


def figure(name: int | str) -> Any:
    """A figure's results; None: it has not been simulated."""
    path = HERE / "results" / f"figure-{name}.json"
    return read(path) if path.exists() else None


def by(rows: Sequence[Any]) -> dict[tuple[int, str], Any]:
    """Rows by users and system."""
    return {(int(row["users"]), row["system"]): row for row in rows}


def over(
    rows: Sequence[Any],
    of: Sequence[str],
    base: str = "balanced",
    systems: Sequence[str] = OTHERS,
    users: Sequence[int] = (),
) -> str:
    """A table of each system's figures over those of `base`, by users."""
    found = by(rows)
    loads = users or sorted({n for n, _ in found})
    lines = [
        [
            f"{TITLES[name]}, {NAMES.get(system, system)}",
            *(f"{found[n, system][name] / found[n, base][name]:.2f} x" for n in loads),
        ]
        for name in of
        for system in systems
    ]
    return table((f"over {NAMES.get(base, base)}", *(f"{n:,} users" for n in loads)), lines)


def equal(document: Any, users: Sequence[int] = ()) -> str:
    """The number of our users at vLLM's TPOT, for each of `users` (default: all that were simulated)."""
    rows = {int(row["users"]): row for row in document["users_at_equal_tpot"] if row["system"] == "recompute"}
    told = []
    for row in (rows[n] for n in users or sorted(rows)):
        least = "at least " if row["at_least"] else ""
        told.append(f"{row['users']:,.0f} of vLLM against {least}{row['ours']:,.0f} of ours")
    return ", ".join(told)


def peaks(systems: Any, names: Sequence[str]) -> str:
    """A table of the most loaded GPU over the median, by model (figure 15)."""
    lines = [
        [model, *(f"{systems[f'{model} {name}']['peak_to_median']['whole_run']:.1f} x" for name in names)]
        for model in ("8b", "13b")
    ]
    return table(("model", *(NAMES[name] for name in names)), lines)


def requests_per_gpu(systems: Any) -> str:
    """The fewest and most requests on a GPU, by system (figure 1)."""
    return ", ".join(f"{min(of['least']):.1f} to {max(of['most']):.1f} ({NAMES[name]})" for name, of in systems.items())
