"""What every test gets: ports that nobody listens on, no terminal's width, and programs that Ctrl-C ends."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

import hypothesis
import pytest

from tests.ports import free_ports

pytest_plugins = [f"tests.plugins.{name}" for name in ("skips", "examples", "long", "stack_warnings", "machine")]
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


@pytest.fixture(scope="session", name="free_ports")
def _free_ports() -> Callable[[int], int]:
    """A function: the first of so many consecutive free loopback ports."""
    return free_ports
