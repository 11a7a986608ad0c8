"""What every test gets: ports that nobody listens on, no terminal's width, and programs that Ctrl-C ends."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable
from itertools import count

import hypothesis
import pytest

pytest_plugins = ["tests.plugins.skips", "tests.plugins.stack_warnings", "tests.plugins.machine"]
#: Below the kernel's ephemeral ports, so that no outgoing connection takes one in between.
_FIRST, _LAST = 12_000, 20_000
#: Which of the processes that share the tests this is (pytest-xdist's `gw0`, `gw1`, …), and how many there are. Each
#: has ports of its own.
_WORKER, _WORKERS = (
    int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]),
    int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")),
)
_PORTS = (_LAST - _FIRST) // _WORKERS
_turn = count()
_status = pytest.StashKey[int]()
# An example's time on a busy machine says nothing of what is tested.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
# Tables are as wide as their test says, not as the terminal that tests are started from.
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)
# What a shell starts in the background ignores Ctrl-C, and so would every program that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    session.config.stash[_status] = int(session.exitstatus)  # as other hooks have left it


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Where NIXL was loaded, end without taking libraries apart, as the services do: its copy of libnl and the system's
    crash then."""
    if "nixl_cu12._api" in sys.modules and _status in config.stash:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(config.stash[_status])


@pytest.fixture(scope="session")
def free_ports() -> Callable[[int], int]:
    """A function: the first of so many consecutive free loopback ports, never the same twice in a run."""

    def find(wanted: int) -> int:
        for _ in range(1000):
            first = _FIRST + _WORKER * _PORTS + (os.getpid() * 131 + next(_turn) * 60) % (_PORTS - wanted)
            if all(_is_free(port) for port in range(first, first + wanted)):
                return first
        raise AssertionError(f"no {wanted} consecutive free ports")

    return find


def _is_free(port: int) -> bool:
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
