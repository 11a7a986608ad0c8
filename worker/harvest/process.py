"""`python -m worker.harvest.process SOCKET WORDS NICENESS`: the process that trains, on the host.

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

from runtime.niceness import step_back
from worker.harvest import wire
from worker.harvest.word_gate import WordGate
from worker.harvest.words import Words


def _step_aside(niceness: int) -> None:
    """See the module."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    step_back(niceness)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as f:
        f.write("1000")


def main() -> None:
    """Entry point."""
    _step_aside(int(sys.argv[3]))
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
