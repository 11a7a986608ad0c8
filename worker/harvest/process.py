"""`python -m worker.harvest.process SOCKET WORDS`: the process that trains, on the host.

Its worker starts it with these two descriptors.

A crash costs its job only. It gives way to everything else on its processors, is the first that the kernel kills when
memory is short, and ends with its worker.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import sys
import threading
import time

from runtime.niceness import TRAINER, step_back
from worker.harvest import wire
from worker.harvest.gate import Stopped
from worker.harvest.words import Word, Words

#: A paused lane looks again after so long, in seconds, if nobody wakes it.
_LOOK_S = 0.1


class WordGate:
    """`Gate` by the words that the worker writes."""

    def __init__(self, words: Words) -> None:
        self._words, self._woken, self._counting = words, threading.Condition(), threading.Lock()

    def enter(self, lane: int) -> None:
        """See `Gate.enter`."""
        words = self._words
        while not self.stopped:
            if lane < words[Word.LANES]:
                words[Word.BEGAN_NS + lane] = time.monotonic_ns()
                return
            with self._woken:
                self._woken.wait(_LOOK_S)
        raise Stopped("the worker wants it")

    def leave(self, lane: int, seconds: float) -> None:
        """See `Gate.leave`."""
        words = self._words
        words[Word.BEGAN_NS + lane] = 0
        with self._counting:
            words[Word.UNITS] += 1
            words[Word.LONGEST_NS] = max(words[Word.LONGEST_NS], int(seconds * 1e9))

    @property
    def stopped(self) -> bool:
        """Whether the worker wants the job to end."""
        return self._words[Word.STOP] != 0

    def wake(self) -> None:
        """The words have changed."""
        with self._woken:
            self._woken.notify_all()


def _step_aside() -> None:
    """See the module."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    step_back(TRAINER)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as f:
        f.write("1000")


def main() -> None:
    """Entry point."""
    _step_aside()
    worker = socket.socket(fileno=int(sys.argv[1]))
    words = Words(int(sys.argv[2]))
    begin = wire.receive(worker)
    assert isinstance(begin, wire.Begin)
    from worker.harvest.work import work  # after _step_aside: it loads torch

    work(begin, worker, WordGate(words))
    sys.stdout.flush()
    os._exit(0)  # threads that wait for weights do not matter any more


if __name__ == "__main__":
    main()
