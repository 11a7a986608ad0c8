"""A disk that is slower than this machine's: the kernel lets each node's store of a stack read and write so many bytes a second, no more.

Control groups do it (the controller blkio of version 1, io of version 2), so it takes root, and data on a whole disk or on a part of one.
What the page cache holds is not slowed; the store reads its SSD tier past it.
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
    """While the block runs, each store that `stack` has now reads at most so many bytes a second from its disk, and writes as many.

    Raises StackError where no store runs, and Unslowable where the kernel does not allow that.
    """
    stores = _stores(stack.pid)
    if not stores:
        raise StackError("no store of the stack runs")
    with slowed(stores, stack.data, bytes_per_s):
        yield


class Unslowable(StackError):
    """The kernel does not slow this disk, or not for this account."""


@contextlib.contextmanager
def slowed(pids: Sequence[int], directory: Path, bytes_per_s: float) -> Iterator[None]:
    """The same for each of these processes, on the disk that has `directory`."""
    disk = _disk(directory)
    made: list[Path] = []
    try:
        for pid in pids:
            made.append(_group(f"upbeat-paced-{pid}"))
            _tell([(made[-1] / name, text) for name, text in _limits(disk, int(bytes_per_s))])
            _tell([(made[-1] / "cgroup.procs", str(pid))])
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
    """major:minor of the disk that has this directory."""
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


def _tell(files: Sequence[tuple[Path, str]]) -> None:
    try:
        for file, text in files:
            file.write_text(text)
    except OSError as e:
        raise _denied(e) from e


def _denied(e: OSError) -> Unslowable:
    return Unslowable(f"the disk cannot be slowed: {e}; run as root where control groups can be made, or leave it as it is")


def _limits(disk: str, bytes_per_s: int) -> list[tuple[str, str]]:
    if _version_1():
        return [(f"blkio.throttle.{way}_bps_device", f"{disk} {bytes_per_s}") for way in ("read", "write")]
    return [("io.max", f"{disk} rbps={bytes_per_s} wbps={bytes_per_s}")]


def _end(group: Path) -> None:
    """Its processes go back to where all are."""
    for pid in (group / "cgroup.procs").read_text().split():
        with contextlib.suppress(OSError):
            (group.parent / "cgroup.procs").write_text(pid)
    group.rmdir()
