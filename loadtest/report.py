"""Output of results: a table with a column a policy, and JSON with date, machine and versions."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from rich.table import Table

from loadtest.sources import ROOT, sources
from runtime.profile_files import processor

_PACKAGES = ("upbeat-server", "aiohttp", "torch", "numpy", "grpcio")
#: The table's rows: title, path into one policy's figures, unit.
_ROWS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("requests", ("requests",), ""),
    ("failed", ("failed",), ""),
    ("requests/s", ("requests_per_s",), ""),
    *((f"TTFT, all: {p}", ("ttft_s", p), "s") for p in ("mean", "p50", "p95", "p99")),
    *((f"TTFT, first turns: {p}", ("ttft_first_turns_s", p), "s") for p in ("mean", "p50", "p95", "p99")),
    *((f"TTFT, returning turns: {p}", ("ttft_returning_turns_s", p), "s") for p in ("mean", "p50", "p95", "p99")),
    *((f"TPOT: {p}", ("tpot_s", p), "ms") for p in ("mean", "p50", "p95", "p99")),
    *((f"end to end: {p}", ("end_to_end_s", p), "s") for p in ("mean", "p50", "p95", "p99")),
    ("normalised latency (end to end over output tokens): mean", ("normalised_s", "mean"), "ms"),
    ("cached share of prompt tokens", ("cached_share",), "%"),
    ("  of returning turns", ("cached_share_returning",), "%"),
    ("imbalance (max/mean), outstanding work", ("imbalance", "outstanding"), ""),
    ("imbalance (max/mean), requests", ("imbalance", "requests"), ""),
    ("hints sent", ("hints", "sent"), ""),
    ("hints answered before the request", ("hints", "answered_before_request"), ""),
    ("hint lead: mean", ("hints", "lead_s", "mean"), "s"),
    ("hint lead: p50", ("hints", "lead_s", "p50"), "s"),
)


def provenance() -> dict[str, Any]:
    """Date, commit, digests of the sources, machine and versions, for every document of results."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(ROOT),
        "sources": sources(),
        "machine": {
            "cpu": processor(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "system": platform.platform(),
            "load_average_1_min": round(os.getloadavg()[0], 2),
        },
        "versions": {"python": platform.python_version()} | {name: v for name in _PACKAGES if (v := _version(name))},
    }


def commit(root: Path) -> str:
    """The commit that is checked out at `root`, and whether files differ from it; empty outside of a repository."""
    if not (root / ".git").exists() or shutil.which("git") is None:
        return ""
    git = ["git", "-C", str(root)]
    said = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False)
    changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=False)
    return said.stdout.strip() + (" with changes" if changed.stdout.strip() else "")


def side_by_side(policies: dict[str, dict[str, Any]], title: str) -> Table:
    """A column a policy, a row a figure; figures that no policy has are omitted."""
    table = Table(title=title, title_justify="left")
    table.add_column("figure")
    for name in policies:
        table.add_column(name, justify="right")
    for row, path, unit in _ROWS:
        values = [_at(figures, path) for figures in policies.values()]
        if any(v is not None for v in values):
            table.add_row(row + (f" ({unit})" if unit else ""), *(_shown(v, unit) for v in values))
    return table


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write `document` to `path` atomically."""
    write_text(path, json.dumps(document, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".draft")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def _at(figures: dict[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = figures
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _shown(value: Any, unit: str) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return str(value)
    if unit == "%":
        return f"{100 * value:.1f}"
    return f"{1000 * value:.1f}" if unit == "ms" else f"{value:.3f}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
