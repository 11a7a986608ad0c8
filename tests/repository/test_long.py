"""`tests/long.txt` names tests that exist, CI runs them, and what is timed becomes the list."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

from tests.plugins.long import LONG_S, names

ROOT = Path(__file__).resolve().parents[2]


def test_each_that_is_listed_exists() -> None:
    listed = names()
    assert listed == sorted(set(listed))
    for test in listed:
        file, *inner = test.split("::")
        nodes = list(ast.walk(ast.parse((ROOT / file).read_text())))
        known = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
        known |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        # A state machine's test is `TestName = Machine.TestCase`, whose method is unittest's.
        assert inner and set(inner) - {"runTest"} <= known, f"{test} is gone: `make test-times` writes the list again"


def test_ci_runs_them() -> None:
    assert "\nmake test-long\n" in (ROOT / ".ci/run").read_text()


def test_the_list_is_written_by_what_each_took(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest, time\n\n\ndef test_short() -> None: ...\n\n\n"
        "@pytest.mark.parametrize('part', [1, 2])\ndef test_parts(part: int) -> None:\n    time.sleep(0.3)\n"
    )
    (tmp_path / "conftest.py").write_text(
        "from pathlib import Path\n\nfrom tests.plugins import long\n\n"
        "long.LIST, long.LONG_S = Path(__file__).with_name('long.txt'), 0.5\n"
    )
    (tmp_path / "long.txt").write_text("test_it.py::test_short\n")

    def run(*arguments: str, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", str(tmp_path), "-p", "tests.plugins.long",
             *arguments, str(tmp_path)],
            cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
            env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "UPBEAT_TEST_TIMES": "", **environment},
        )  # fmt: skip
        return done.stdout

    assert LONG_S > 0.6 and "1 passed, 2 deselected" in run("-m", "long")
    (tmp_path / "test_bad.py").write_text("def test_bad() -> None:\n    raise ValueError\n")
    run(UPBEAT_TEST_TIMES="1")
    assert (tmp_path / "long.txt").read_text() == "test_it.py::test_short\n", "not all have passed"
    (tmp_path / "test_bad.py").unlink()
    run(UPBEAT_TEST_TIMES="1")
    assert (tmp_path / "long.txt").read_text() == "test_it.py::test_parts\n"
    assert "2 passed, 1 deselected" in run("-m", "long")
