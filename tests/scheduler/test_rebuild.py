"""A scheduler process that is killed knows its fleet and every session again."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(120)
def test_a_scheduler_that_was_killed_is_told_everything_again() -> None:
    path = Path(__file__).parents[2] / "bench" / "scheduler" / "rebuild.py"
    spec = importlib.util.spec_from_file_location("rebuild", path)
    assert spec is not None and spec.loader is not None
    rebuild = sys.modules["rebuild"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rebuild)
    # it returns once all nodes serve and all sessions are known
    found = rebuild.measure(nodes=20, sessions=4000, times=1)
    assert found["nodes"] == 20 and found["sessions"] == 4000
