"""Niceness of work when processors are short.

Event loops keep their priority: they work in microseconds, and every request needs them. CPU engines, which compute all
the time under load, get a higher niceness, and the preparation of requests that can wait gets a still higher one.

Where the kernel divides processors between sessions (autogroups, `man 7 sched`; a common default), niceness applies
within a session only. So all processes that a service starts stay in its session.
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
#: Threads that tokenise large prompts.
TOKENISER = 5
#: Processes and threads that compile grammars.
GRAMMAR = 10
#: Processes that train: the most there is. (SCHED_IDLE would keep them from even starting on a busy machine.)
TRAINER = 19


def step_back(niceness: int) -> None:
    """Adds `niceness` to that of the calling thread, which threads it starts later inherit. Linux only; elsewhere no
    effect."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + niceness)


def stepped_back(niceness: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs `work` in a temporary thread of this niceness and returns its result. Threads that it starts inherit the
    niceness."""
    with ThreadPoolExecutor(1, "stepped-back", step_back, (niceness,)) as pool:
        return pool.submit(work, *args, **kwargs).result()
