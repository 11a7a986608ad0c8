"""Which sources a result measured: a digest of each part of the project, and which parts have changed since.

A digest is over paths and Git's blob ids of a part's sources, so it is the same for a work tree and for a commit, and
still right when commits were rebased. Sources are code; results, texts, and the files of a bench that only tell results
are left out.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
#: Folders with all that is below them; `/*`: the folder's own files only.
PARTS = (
    "contracts",
    "runtime",
    "gateway",
    "scheduler",
    "scheduler/core",
    "kvstore",
    "kvstore/core",
    "storelink",
    "worker",
    "worker/core",
    "sidecar",
    "vllm-plugin/src",
    "loadtest/*",
    "loadtest/compare",
    "loadtest/simulate",
)
_SUFFIXES = frozenset((".py", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".toml", ".txt"))
_REPORTING = frozenset(("report.py", "tables.py", "picture.py", "pictures.py", "verdicts.py", "claims.py"))
_SKIPPED = frozenset(("__pycache__", "build", "tests"))


def is_source(path: str) -> bool:
    """Whether a change of this file could change a result."""
    name = PurePosixPath(path)
    if _SKIPPED & set(name.parts[:-1]) or (name.parts[0] == "bench" and name.name in _REPORTING):
        return False
    return name.suffix in _SUFFIXES or name.name == "run"


def in_work_tree(root: Path, parts: Iterable[str]) -> dict[str, str]:
    """Git's blob id of every source of `parts`, by path relative to `root`."""
    found = {}
    for part in parts:
        own, folder = part.endswith("/*"), root / part.removesuffix("/*")
        for path in folder.glob("*") if own else folder.rglob("*"):
            name = path.relative_to(root).as_posix()
            if is_source(name) and path.is_file():
                data = path.read_bytes()
                found[name] = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
    return found


def in_commit(root: Path, commit: str) -> dict[str, str] | None:
    """As `in_work_tree`, of every source of a commit; None if this checkout does not have it."""
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-tree", "-r", "--full-tree", commit], capture_output=True, text=True, check=False
    )
    if listed.returncode:
        return None
    lines = (line.partition("\t") for line in listed.stdout.splitlines())
    return {path: about.split()[2] for about, _, path in lines if is_source(path)}


def digests(blobs: Mapping[str, str], parts: Iterable[str]) -> dict[str, str]:
    """A digest of each part, by its name. blobs: of `in_work_tree` or `in_commit`."""
    made = {}
    for part in parts:
        own, folder = part.endswith("/*"), part.removesuffix("/*") + "/"
        held = [p for p in blobs if p.startswith(folder) and not (own and "/" in p.removeprefix(folder))]
        made[part] = hashlib.sha256("".join(f"{p} {blobs[p]}\n" for p in sorted(held)).encode()).hexdigest()[:16]
    return made


def sources(root: Path = ROOT) -> dict[str, str]:
    """Digests of all parts of this checkout and, in a bench's program, of the bench; none outside of a checkout."""
    parts = [*PARTS, *_running_bench(root)]
    return digests(in_work_tree(root, parts), parts) if (root / "bench").is_dir() else {}


def changed(then: Mapping[str, str], now: Mapping[str, str], parts: Iterable[str]) -> list[str]:
    """Those of `parts` that are not as they were, or of which nothing is known."""
    return [part for part in parts if then.get(part) is None or then.get(part) != now.get(part)]


def _running_bench(root: Path) -> list[str]:
    """The bench whose program this process runs."""
    program = Path(getattr(sys.modules["__main__"], "__file__", None) or "/").resolve()
    if program.is_relative_to(root / "bench") and program.parent.parent == root / "bench":
        return [f"bench/{program.parent.name}"]
    return []
