"""Results of other benches on real hardware, at its scale. Runs nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.table import Table

BENCH = Path(__file__).resolve().parents[1]


def policies(found: dict[str, Any]) -> list[str]:
    """Recompute, sticky and ours on the conversation trace (compare figures 11 and 12)."""
    return [
        f"{name}: TTFT {1000 * f['ttft_s']['mean']:.0f} ms, TPOT {1000 * f['tpot_s']['mean']:.1f} ms, "
        f"{f['requests_per_s']:.2f} requests/s"
        for name, f in found["policies"].items()
    ]


def balance(found: dict[str, Any]) -> list[str]:
    """Four workers (compare figures 1 and 15)."""
    rows = [r for r in found["rows"] if r["kind"] != "simulated"]
    return [
        f"{r['policy']}: peak to median {r['peak_to_median'].get('whole_run')}, TTFT {1000 * r['ttft_mean_s']:.0f} ms"
        for r in rows
    ]


def agents(found: dict[str, Any]) -> list[str]:
    """A team on three nodes, no hints over hints (compare figure 16)."""
    return [
        f"{name.replace('_', ' ')}: end to end {its['no_hints_over_hints']['end_to_end_s']['median']:.2f}"
        for name, its in found.items()
        if name.endswith("_files")
    ]


SHOWN: dict[str, Callable[[dict[str, Any]], list[str]]] = {"policies": policies, "balance": balance, "agents": agents}


def table() -> Table:
    """A row per result; a bench without one shows its command."""
    shown = Table(title="real, at this machine's scale", title_justify="left", show_lines=True)
    for title in ("bench", "date", "what"):
        shown.add_column(title)
    for name, of in SHOWN.items():
        path = BENCH / name / "result.json"
        if path.exists():
            found = json.loads(path.read_text())
            shown.add_row(f"bench/{name}", str(found.get("date", ""))[:10], "\n".join(of(found)))
        else:
            shown.add_row(f"bench/{name}", "", f"no result.json; bench/{name}/run makes it")
    return shown
