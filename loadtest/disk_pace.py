"""Simulates a slower disk: the kernel limits the bytes a second that each store of a stack reads and writes.

Uses control groups (blkio of version 1, io of version 2), so it needs root, and data on a disk or partition. Reads from
the page cache are not limited; stores bypass it for the SSD tier.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from loadtest.stack import Stack, StackError, members

_ROOT = Path("/sys/fs/cgroup")
_PROGRAM = "upbeat-kvstore"


@contextlib.contextmanager
def paced(stack: Stack, bytes_per_s: float) -> Iterator[None]:
    """During the block, each running store of `stack` reads and writes at most `bytes_per_s` each on its disk.

    Raises StackError if no store runs, Unslowable if the kernel does not allow it.
    """
    stores = _stores(stack.pid)
    if not stores:
        raise StackError("no store of the stack runs")
    with slowed(stores, stack.data, bytes_per_s):
        yield


class Unslowable(StackError):
    """The kernel cannot limit this disk, or not for this user."""


@contextlib.contextmanager
def slowed(pids: Sequence[int], directory: Path, bytes_per_s: float) -> Iterator[None]:
    """The same for each of these processes, on the disk of `directory`."""
    disk = _disk(directory)
    made: list[Path] = []
    try:
        for pid in pids:
            made.append(_group(f"upbeat-paced-{pid}"))
            _write([(made[-1] / name, text) for name, text in _limits(disk, int(bytes_per_s))])
            _write([(made[-1] / "cgroup.procs", str(pid))])
        yield
    finally:
        for group in made:
            _end(group)


def _stores(session: int) -> list[int]:
    found = []
    for pid in members(session):
        with contextlib.suppress(psutil.Error):
            if any(Path(word).name == _PROGRAM for word in psutil.Process(pid).cmdline()):
                found.append(pid)
    return found


def _disk(directory: Path) -> str:
    """major:minor of the disk of `directory`."""
    device = directory.stat().st_dev
    here = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    if not here.exists():
        raise Unslowable(f"{directory} is on no disk that the kernel could slow; give a directory on one")
    whole = here.resolve().parent if (here / "partition").exists() else here
    return (whole / "dev").read_text().strip()


def _version_1() -> bool:
    return (_ROOT / "blkio").is_dir()


def _group(name: str) -> Path:
    group = (_ROOT / "blkio" if _version_1() else _ROOT) / name
    try:
        if not _version_1():
            (_ROOT / "cgroup.subtree_control").write_text("+io")
        group.mkdir()
    except OSError as e:
        raise _denied(e) from e
    return group


def _write(files: Sequence[tuple[Path, str]]) -> None:
    try:
        for file, text in files:
            file.write_text(text)
    except OSError as e:
        raise _denied(e) from e


def _denied(e: OSError) -> Unslowable:
    return Unslowable(
        f"the disk cannot be slowed: {e}; run as root where control groups can be made, or leave it as it is"
    )


def _limits(disk: str, bytes_per_s: int) -> list[tuple[str, str]]:
    if _version_1():
        return [(f"blkio.throttle.{way}_bps_device", f"{disk} {bytes_per_s}") for way in ("read", "write")]
    return [("io.max", f"{disk} rbps={bytes_per_s} wbps={bytes_per_s}")]


def _end(group: Path) -> None:
    """Move the group's processes to its parent, and delete it."""
    for pid in (group / "cgroup.procs").read_text().split():
        with contextlib.suppress(OSError):
            (group.parent / "cgroup.procs").write_text(pid)
    group.rmdir()
