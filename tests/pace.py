"""How long something takes on a machine that others use too: without the time in which it waited for a core."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path


def waited_s(pids: Iterable[int]) -> float:
    """Seconds for which threads of these processes were ready and had no core, since they began; 0.0 where the kernel
    does not say. Threads that have ended do not count."""
    return sum(_of(stat) for pid in pids for stat in Path(f"/proc/{pid}/task").glob("*/schedstat"))


def crowded_s() -> float:
    """Seconds since this machine's start in which somebody was ready and had no core; 0.0 where the kernel does not
    say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/pressure/cpu").read_text().splitlines()[0].rpartition("total=")[2]) / 1e6
    return 0.0


def thread_waited_s(thread: int) -> float:
    """`waited_s` of one thread of this process, by its native id."""
    return _of(Path(f"/proc/self/task/{thread}/schedstat"))


def _of(stat: Path) -> float:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(stat.read_text().split()[1]) / 1e9
    return 0.0
