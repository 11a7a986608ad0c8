"""A failed test shows what the processes of the stacks that ran beside it had warned of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.stack import Stack

#: So many lines of each process.
LINES = 20
_LEVELS = {"warning", "error", "critical"}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.failed:
        for stack in list(Stack.running):
            if lines := list(warnings(stack.run_dir / "logs")):
                report.sections.append((f"warnings of {stack.directory}", "\n".join(lines)))
    return report


def warnings(logs: Path) -> Iterator[str]:
    """The last warnings and errors in a stack's logs, and lines that are no log at all."""
    for path in sorted(logs.glob("*.log")):
        found = [line for line in path.read_text(errors="replace").splitlines() if _counts(line)]
        yield from (f"{path.stem}: {line}" for line in found[-LINES:])


def _counts(line: str) -> bool:
    try:
        said = json.loads(line)
    except ValueError:
        return bool(line.strip())
    return not isinstance(said, dict) or said.get("level") in _LEVELS
