"""Tests that take long: those that `tests/long.txt` names get the marker `long`. `make test` leaves them to `make
test-long`. `make test-times` runs both, and if all pass it writes the list again by what each took.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

LIST = Path(__file__).resolve().parents[1] / "long.txt"
#: Seconds on two cores from which a test is long, all its parameters together, without its fixtures.
LONG_S = 2.0
#: Never long: what this project is for.
ALWAYS = "tests/e2e/test_any_node_any_tier.py"


def names() -> list[str]:
    """The long tests, as `tests/FILE.py::test_name`."""
    return LIST.read_text().split()


def name(nodeid: str) -> str:
    """A test's name without its parameters."""
    return nodeid.partition("[")[0]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them, before `-m` selects."""
    listed = frozenset(names())
    for item in items:
        if name(item.nodeid) in listed:
            item.add_marker("long")


def pytest_configure(config: pytest.Config) -> None:
    """Time the tests where that is asked for; of the processes of pytest-xdist in the one that gets all reports."""
    if os.environ.get("UPBEAT_TEST_TIMES") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Times())


class _Times:
    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.seconds[name(report.nodeid)] += report.duration  # type: ignore[assignment]

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus:
            return  # a test that fails says nothing of its time
        found = (test for test in self.seconds if self.seconds[test] >= LONG_S and not test.startswith(ALWAYS))
        LIST.write_text("".join(f"{test}\n" for test in sorted(found)))
