"""A quick run tries a part of each property's examples; `make test-slow` tries all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.plugins.examples import LEAST, ONE_IN, quick

ROOT = Path(__file__).parents[2]
PROPERTIES = """
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

tried = dict.fromkeys(("plain", "named", "method", "slow", "machine"), 0)
numbers = st.integers(0, 10**9)

@given(numbers)
def test_plain(n):
    tried["plain"] += 1

@pytest.mark.parametrize("which", [1, 2])
@settings(max_examples=40)
@given(n=numbers)
def test_named(which, n):
    tried["named"] += which == 1

class TestIt:
    @settings(max_examples=40)
    @given(numbers)
    def test_method(self, n):
        tried["method"] += 1

@pytest.mark.slow
@settings(max_examples=40)
@given(numbers)
def test_slow(n):
    tried["slow"] += 1

class Machine(RuleBasedStateMachine):
    @initialize()
    def begin(self):
        tried["machine"] += 1

    @rule(n=numbers)
    def take(self, n):
        pass

TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=40, stateful_step_count=2)

def test_all_tell():
    print(tried)
"""


def tried(folder: Path, **environment: str) -> str:
    (folder / "test_it.py").write_text(PROPERTIES)
    plugins = ["-p", "_hypothesis_pytestplugin", "-p", "tests.plugins.examples"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-s", "-c", "/dev/null", "--rootdir", str(folder), *plugins, str(folder)],
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "UPBEAT_EXAMPLES": "", **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_a_quick_run_tries_a_part_and_of_slow_tests_all(tmp_path: Path) -> None:
    assert str({"plain": 25, "named": 10, "method": 10, "slow": 40, "machine": 10}) in tried(tmp_path)


def test_all_are_tried_where_all_are_asked_for(tmp_path: Path) -> None:
    said = tried(tmp_path, UPBEAT_EXAMPLES="all")
    assert str({"plain": 100, "named": 40, "method": 40, "slow": 40, "machine": 40}) in said


def test_few_examples_stay_few() -> None:
    assert [quick(named) for named in (1, LEAST, LEAST + 1, LEAST * ONE_IN, 600)] == [1, LEAST, LEAST, LEAST, 150]


def test_test_slow_tries_all() -> None:
    recipe = (ROOT / "Makefile").read_text().partition("\ntest-slow:")[2].partition("\n\n")[0]
    assert "UPBEAT_EXAMPLES=all" in recipe and '-m "hypothesis and ' in recipe
