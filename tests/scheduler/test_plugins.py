"""Placement policies of other distributions: installed for real, found by name, tried at the start, and placing
turns."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from contracts.errors import ConfigError
from contracts.ids import SessionKey
from scheduler.core.control import Ask, Control, Settings
from scheduler.core.fleet import LoadReport
from scheduler.core.policies import POLICIES
from scheduler.plugins import GROUP, policy_named
from tests.scheduler.test_core import MODEL

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "placement.md").read_text()
EXAMPLE = re.search(r"```python\n# packing\.py\n(.*?)```", DOCUMENT, re.DOTALL)

Install = Callable[[str, str, str], Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a distribution of one module into a directory of its own, which is on sys.path: (module, source, entry
    points)."""

    def put(module: str, source: str, entries: str) -> Path:
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{GROUP}]\n{entries}\n")
        (tmp_path / f"{module}.py").write_text(source)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, module, raising=False)
        return tmp_path

    return put


def test_the_documents_example_is_a_policy_and_places_by_its_terms(install: Install) -> None:
    assert EXAMPLE is not None
    install("packing", EXAMPLE[1], "pack = packing:pack")
    control = Control(Settings(policy_named("pack")))
    for i in range(3):
        control.fleet.worker_joined(f"node-{i}", "w", (MODEL,), 0.0)
        control.fleet.store_joined(f"node-{i}", "s")
    taken = [control.place(Ask(f"r{i}", SessionKey("t", f"s{i}"), "m"), 0.0) for i in range(6)]
    assert [p.node for p in taken] == ["node-0"] * 2 + ["node-1"] * 2 + ["node-2"] * 2
    assert taken[0].choice.why.startswith("node-0 order=0 ")
    for i, work in enumerate((9.0, 8.0, 7.0)):
        control.fleet.loaded(f"node-{i}", LoadReport(outstanding_s=work), [f"r{2 * i}", f"r{2 * i + 1}"], [], 0.0)
    assert control.place(Ask("late", SessionKey("t", "late"), "m"), 0.0).node == "node-2", (
        "all are full: the least work"
    )


def test_a_name_that_nobody_brings_is_answered_with_those_that_are_there(install: Install) -> None:
    install("packing", "def pack(*a): ...\n", "pack = packing:pack")
    with pytest.raises(ConfigError) as e:
        policy_named("sticki")
    for name in (*POLICIES, "pack", "sticki", GROUP):
        assert name in str(e.value)


@pytest.mark.parametrize(
    ("source", "entry", "said"),
    [
        ("x = 1 / 0\n", "bad:pack", "cannot be loaded: division by zero"),
        ("", "bad:pack", "cannot be loaded"),
        ("pack = 5\n", "bad:pack", "is not a function"),
        ("def pack(snapshot, turn, rows, seed):\n    return {}\n", "bad:pack", "must give a dictionary of terms"),
        ("def pack(snapshot, turn, rows, seed):\n    return {'a': [1.0]}\n", "bad:pack", "{'a': (1,)}"),
        ("def pack(snapshot, turn):\n    return {}\n", "bad:pack", "fails on a fleet of two idle nodes: TypeError"),
        ("def pack(snapshot, turn, rows, seed):\n    return 5\n", "bad:pack", "fails on a fleet"),
    ],
)
def test_a_policy_that_cannot_work_stops_the_start_and_says_why(
    install: Install, source: str, entry: str, said: str
) -> None:
    install("bad", source, f"pack = {entry}")
    with pytest.raises(ConfigError, match=re.escape("scheduler.policy = 'pack' (bad:pack)")) as e:
        policy_named("pack")
    assert said in str(e.value)


def test_a_scheduler_process_with_a_wrong_name_ends_with_one_line(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("scheduler: {policy: sticki}\n")
    done = subprocess.run(
        [sys.executable, "-m", "scheduler", "--config", str(config)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (
        done.returncode == 2
        and "scheduler.policy = 'sticki' does not exist; known: balanced, cache-aware" in done.stderr
    )
