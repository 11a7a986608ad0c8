"""Damaged databases of stored responses: put aside, and deleted no later than what they hold would have been."""

from __future__ import annotations

import contextlib
from pathlib import Path

from runtime import telemetry

log = telemetry.logger("gateway.responses")
_TAILS = ("", "-wal", "-shm")


def _aside(path: Path) -> list[Path]:
    return [path.with_name(f"{path.name}{tail}.damaged") for tail in _TAILS]


def delete(path: Path) -> int:
    """Delete a database and its companions; how many files there were. Raises OSError when one cannot be deleted."""
    found = [file for tail in _TAILS if (file := path.with_name(path.name + tail)).exists()]
    for file in found:
        file.unlink(missing_ok=True)
    return len(found)


def put_aside(path: Path) -> None:
    """Rename a database and its companions."""
    for tail, aside in zip(_TAILS, _aside(path), strict=True):
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + tail).replace(aside)
    log.error(
        "a damaged database of stored responses was put aside; it is deleted gateway.responses_keep_s after its last "
        "change, or as soon as a session is erased",
        file=str(_aside(path)[0]),
    )


def drop(path: Path, before_s: float, why: str) -> int:
    """Delete the files of a database that was put aside, those last changed before then (seconds since the epoch); how
    many. Raises OSError when one cannot be deleted."""
    gone = 0
    for aside in _aside(path):
        with contextlib.suppress(FileNotFoundError):
            if aside.stat().st_mtime < before_s:
                aside.unlink()
                gone += 1
    if gone:
        log.warning("a damaged database of stored responses, put aside before, was deleted", why=why, files=gone)
    return gone
