"""When, at which commit and on which machine a committed result was measured, and whether its code has changed since.

New results say so themselves (`loadtest.report.provenance`). `measured.json` says it of results from before that: the
commit in the result, or else the one that brought it, with digests of that commit's sources.

    .venv/bin/python bench/measured.py       # write measured.json again for results that say nothing themselves
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from loadtest.sources import changed, digests, in_commit, in_work_tree  # noqa: E402

LEDGER = ROOT / "bench" / "measured.json"
_STACK = ("contracts", "runtime", "gateway", "scheduler", "kvstore", "storelink", "worker")
_CLIENT = ("loadtest/*", "loadtest/compare")
_SIMULATED = ("contracts", "scheduler/core", "kvstore/core", "worker/core", "loadtest/*", "loadtest/simulate")
_VLLM = ("sidecar", "vllm-plugin/src")
#: The parts of `loadtest.sources` that a bench measures, beside its own folder. Results that differ: by path.
MEASURES: dict[str, tuple[str, ...]] = {
    "activation": (*_STACK, "loadtest/*"),
    "agents": (*_STACK, "loadtest/*"),
    "balance": (*_SIMULATED, *_STACK),
    "balloon": ("contracts", "runtime", "worker"),
    "before": (*_STACK, *_CLIENT),
    "calibration": (*_SIMULATED, *_STACK),
    "codecs": _STACK,
    "engine": ("worker",),
    "gateway": ("contracts", "runtime", "gateway"),
    "gpu": ("worker", "kvstore", "storelink"),
    "harli": _SIMULATED,
    "harvest": ("contracts", "runtime", "worker"),
    "hbm_pressure": (*_STACK, "loadtest/*"),
    "hint_flood": (*_STACK, "loadtest/*"),
    "hints": _SIMULATED,
    "kvstore": ("contracts", "runtime", "kvstore", "storelink"),
    "many_models": (*_STACK, "loadtest/*"),
    "matched": (*_STACK, *_CLIENT, *_VLLM),
    "mirage": _SIMULATED,
    "needle_ladder": _STACK,
    "peers": (*_STACK, *_CLIENT),
    "policies": (*_STACK, *_CLIENT),
    "pressure": _SIMULATED,
    "pressure/result-real.json": (*_STACK, "loadtest/*"),
    "priorities": _SIMULATED,
    "prism": _SIMULATED,
    "remap": ("contracts", "runtime", "worker"),
    "returning_session": (*_STACK, "loadtest/*"),
    "returning_session_tiers": (*_STACK, "loadtest/*"),
    "sampling": ("worker",),
    "scale": _SIMULATED,
    "scheduler": ("contracts", "runtime", "scheduler"),
    "symphony": _SIMULATED,
    "vllm": (*_STACK, *_CLIENT, *_VLLM),
}


@dataclass(frozen=True, slots=True)
class Measurement:
    """date: ISO, of the day at least. commit: short, empty if unknown; brought: it is the commit that added the result;
    touched: files differed from it. changed: parts that are not as they were measured."""

    path: str
    date: str
    commit: str
    brought: bool
    touched: bool
    machine: str
    changed: tuple[str, ...]

    @property
    def current(self) -> bool:
        """Whether the code is still as it was measured."""
        return not self.changed


def results(root: Path = ROOT) -> list[str]:
    """Paths of all committed results, relative to `root`."""
    found = [*root.glob("bench/*/*.json"), *root.glob("bench/*/results/*.json")]
    return sorted(path.relative_to(root).as_posix() for path in found if not path.name.startswith("."))


def parts_of(path: str) -> tuple[str, ...]:
    """The parts that the result at `path` measured. Raises KeyError for a bench that MEASURES lacks."""
    bench = path.split("/")[1]
    return (*MEASURES.get(path.removeprefix("bench/"), MEASURES[bench]), f"bench/{bench}")


def measurement(path: str, document: Mapping[str, Any] | None = None, root: Path = ROOT) -> Measurement:
    """What is known of the result at `path`. document: its content, if it was read already."""
    document = json.loads((root / path).read_text()) if document is None else document
    said = _ledger(root).get(path, {})
    then = document.get("sources") or said.get("sources", {})
    commit = str(document.get("commit") or said.get("commit", ""))
    machine = document.get("machine") or {}
    # A result that another program wrote (`upbeat bench` for bench/policies) has no digest of the bench's own folder.
    parts = [part for part in parts_of(path) if part in then or not part.startswith("bench/")]
    return Measurement(
        path,
        date_of(document),
        commit.split()[0][:12] if commit else "",
        "commit" not in document,
        commit.endswith("changes"),
        f"{int(machine['cores'])} cores, {machine['cpu']}" if machine else "",
        tuple(changed(then, _now(root), parts)),
    )


def date_of(document: Mapping[str, Any]) -> str:
    """The day of a result; of one with several stretches, the last one's."""
    dates = [document.get("date"), *(of.get("date") for of in document.get("stretches", []) if isinstance(of, dict))]
    return max((str(date)[:10] for date in dates if date), default="")


@functools.cache
def _ledger(root: Path) -> dict[str, Any]:
    path = root / "bench" / LEDGER.name
    return dict(json.loads(path.read_text())) if path.exists() else {}


@functools.cache
def _now(root: Path) -> dict[str, str]:
    """Digests of this checkout's parts."""
    parts = sorted({part for path in results(root) for part in parts_of(path)})
    return digests(in_work_tree(root, parts), parts)


def recorded(path: str, document: Mapping[str, Any]) -> dict[str, Any]:
    """The ledger's entry for a result without digests. Raises ValueError if this checkout lacks the commit."""
    commit = str(document.get("commit") or _git("log", "-1", "--format=%h", "--abbrev=12", "--", path))
    blobs = in_commit(ROOT, commit.split()[0]) if commit else None
    if blobs is None:
        raise ValueError(f"{path}: this checkout does not have the commit {commit or 'that brought it'}")
    return {"commit": commit, "sources": digests(blobs, parts_of(path))}


def _git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    known, made = _ledger(ROOT), {}
    for path in results():
        document = json.loads((ROOT / path).read_text())
        if not document.get("sources"):
            made[path] = known.get(path) or recorded(path, document)
    LEDGER.write_text(json.dumps(made, indent=1) + "\n")
    print(f"{LEDGER.relative_to(ROOT)}: {len(made)} results")
    return 0


if __name__ == "__main__":
    sys.exit(main())
