"""A rank that computes on the CPU steps back behind what serves it (`runtime/niceness.py`). Its threads are busy on
every core: the engine, its HTTP server and the node's other processes would wait for the kernel's turns at each token.
"""

from __future__ import annotations

import contextlib
import os

#: Added to a rank's threads; that of Upbeat's own engine on the CPU.
ENGINE = 5


def threads() -> list[int]:
    """This process's threads. Linux only; elsewhere none."""
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir("/proc/self/task")]
    return []


def step_back(of: list[int]) -> None:
    """Add to the niceness of these threads, and so of those that they start."""
    for thread in of:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + ENGINE)
