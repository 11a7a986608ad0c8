"""What a failed test shows of the stacks that ran beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HARNESS = Path(__file__).parents[2]
FAILS = """
import json
from loadtest.stack import Stack

def test_it(tmp_path):
    stack = Stack(directory=tmp_path / "mine")
    Stack.running.add(stack)
    logs = stack.run_dir / "logs"
    logs.mkdir(parents=True)
    said = [{"event": "all is well", "level": "info"}, {"event": "the store is silent", "level": "warning"}]
    lines = "".join(json.dumps(s) + "\\n" for s in said)
    (logs / "worker-0.log").write_text(lines + "Traceback (most recent call last)\\n")
    assert not WRONG
"""


def run(folder: Path, wrong: bool) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(FAILS.replace("WRONG", str(wrong)))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        "/dev/null",
        "--rootdir",
        str(folder),
        "-p",
        "tests.plugins.stack_warnings",
        str(folder / "test_it.py"),
    ]
    env = os.environ | {"PYTHONPATH": str(HARNESS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=HARNESS, env=env, capture_output=True, text=True, timeout=60)


def test_a_failed_test_shows_warnings_and_what_is_no_log(tmp_path: Path) -> None:
    shown = run(tmp_path, wrong=True).stdout
    assert "warnings of" in shown and "worker-0: Traceback (most recent call last)" in shown
    assert 'worker-0: {"event": "the store is silent"' in shown and 'worker-0: {"event": "all is well"' not in shown


def test_one_that_passes_shows_nothing(tmp_path: Path) -> None:
    done = run(tmp_path, wrong=False)
    assert done.returncode == 0 and "warnings of" not in done.stdout
