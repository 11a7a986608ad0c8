"""How far work steps back when processors are short: whoever many wait for goes first.

Event loops do not step back: what they do takes microseconds, and every request needs all of them. Engines on the CPU, which always have
something to compute under load, step back for them, and what prepares a request that may wait steps back further.

Where the kernel shares processors by session (autogroups, `man 7 sched`; on by default in many distributions), a niceness counts within a
session only. So whatever a service starts stays in its session.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

#: Threads of an engine that computes on the CPU.
ENGINE = 5
#: Processes that read large bodies.
DECODER = 5
#: Processes and threads that compile grammars.
GRAMMAR = 10


def step_back(niceness: int) -> None:
    """Add this to the niceness of the calling thread, which those have too that it starts from now on. Linux, where each thread has one;
    elsewhere nothing."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + niceness)


def stepped_back(niceness: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What `work` returns, called in a thread that steps back and ends with it: the threads that it starts step back, too."""
    with ThreadPoolExecutor(1, "stepped-back", step_back, (niceness,)) as pool:
        return pool.submit(work, *args, **kwargs).result()
