"""A skip whose reason is not listed fails the run, in one process and in several; one that is listed is printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plugins.skips import ALLOWED

ROOT = Path(__file__).parents[2]
LISTED = "there is no compiler"


def run(folder: Path, body: str, *flags: str) -> tuple[int, str]:
    """The exit status and the output of a run of one file with that body."""
    (folder / "test_it.py").write_text(f"import pytest\n\n{body}\n\ndef test_passes():\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", str(folder), "-p", "tests.plugins.skips"]
    done = subprocess.run(
        [*command, str(folder / "test_it.py"), *flags], cwd=ROOT, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("body", "flags"),
    [
        ("def test_skips():\n    pytest.skip('no time for this')", ()),
        ("@pytest.mark.skip(reason='no time for this')\ndef test_skips():\n    pass", ()),
        ("pytest.importorskip('no_such_module', reason='no time for this')", ()),
        ("def test_skips():\n    pytest.skip('no time for this')", ("-p", "xdist.plugin", "-n", "2")),
    ],
    ids=["in a test", "by a mark", "of a module", "in two processes"],
)
def test_a_reason_that_is_not_listed_fails_the_run(tmp_path: Path, body: str, flags: tuple[str, ...]) -> None:
    status, said = run(tmp_path, body, *flags)
    assert status == pytest.ExitCode.TESTS_FAILED, said
    assert "not allowed" in said and "1 x no time for this" in said


def test_a_listed_reason_is_printed_with_what_makes_the_test_run(tmp_path: Path) -> None:
    status, said = run(tmp_path, f"def test_skips():\n    pytest.skip({LISTED!r})")
    assert status == pytest.ExitCode.OK, said
    assert f"1 x {LISTED} (to run it: cc)" in said


def test_no_listed_reason_allows_everything() -> None:
    for pattern in ALLOWED:
        assert not re.fullmatch(pattern, "no time for this"), pattern
