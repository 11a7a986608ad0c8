"""Failpoints: what may be ordered, what it does, and that every point is somewhere in the sources."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from contracts.errors import ConfigError
from kvstore.failpoints import POINTS, arm, reach
from runtime.config_file import load_config
from storelink.arena_sharing import arenas_of

SOURCES = Path(__file__).parents[2] / "kvstore"


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    arm({})


def test_nothing_happens_unless_a_point_is_armed():
    for name in POINTS:
        reach(name)


def test_an_error_comes_every_time_or_at_the_nth_only():
    arm({"ssd.before_sync": "error:ENOSPC", "ssd.after_read": "error:EIO@2"})
    for _ in range(2):
        with pytest.raises(OSError, match=r"ssd\.before_sync") as raised:
            reach("ssd.before_sync")
        assert raised.value.errno == errno.ENOSPC
    reach("ssd.after_read")
    with pytest.raises(OSError, match=r"ssd\.after_read") as raised:
        reach("ssd.after_read")
    assert raised.value.errno == errno.EIO
    reach("ssd.after_read")


def test_a_delay_delays():
    arm({"ssd.after_read": "delay:30"})
    began = time.monotonic()
    reach("ssd.after_read")
    assert time.monotonic() - began >= 0.03


def test_a_kill_is_a_sigkill_of_the_own_process_at_the_nth_time():
    program = (
        "from kvstore.failpoints import arm, reach; arm({'ssd.renamed': 'kill@3'})\n"
        "for i in range(5): print('time', i, flush=True); reach('ssd.renamed')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=SOURCES.parent
    )
    assert done.returncode == -signal.SIGKILL
    assert [line for line in done.stdout.splitlines() if line.startswith("time")] == ["time 0", "time 1", "time 2"]


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (
            {"ssd.nowhere": "kill"},
            "kv.failpoints.ssd.nowhere = 'kill': there is no such failpoint; give one of recover.between_files",
        ),
        ({"ssd.renamed": "explode"}, "kv.failpoints.ssd.renamed = 'explode': give kill, delay:MS or error:EIO"),
        ({"ssd.renamed": "kill@0"}, "give kill, delay:MS"),
        ({"ssd.renamed": "error:EPERM"}, "give kill, delay:MS"),
        (
            {"save.granted": "error:EIO"},
            "kv.failpoints.save.granted = 'error:EIO': nothing answers an error there; give kill or delay:MS",
        ),
    ],
)
def test_a_wrong_name_or_action_is_refused_with_its_remedy_and_arms_nothing(wanted, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        arm({"ssd.before_sync": "error:EIO", **wanted})
    reach("ssd.before_sync")


def test_they_can_be_set_in_the_environment(monkeypatch):
    monkeypatch.setenv("UPBEAT__KV__FAILPOINTS", '{"ssd.before_rename": "kill@3"}')
    assert load_config(None).kv.failpoints == {"ssd.before_rename": "kill@3"}


async def test_a_store_with_an_unknown_one_does_not_start(make_stack):
    stack = make_stack(failpoints={"ssd.nowhere": "kill"})
    stack.start(0)
    assert stack.processes[0].wait(30) == 2
    assert "kv.failpoints.ssd.nowhere" in stack.log(0) and "give one of" in stack.log(0)
    assert not arenas_of(stack.config.node(0).arena_stem)


def test_every_point_of_the_table_is_reached_by_the_sources_and_no_other_is():
    text = "\n".join(p.read_text() for p in SOURCES.rglob("*.py") if p.name != "failpoints.py")
    named = set(re.findall(r'\breach\(\s*"([a-z_.]+)"', text))
    for kind in re.findall(r'\.put\(\s*"([a-z]+)"', text):
        named |= {f"{kind}.before_put", f"{kind}.after_put"}
    for kind in re.findall(r'\.delete_durably\("([a-z]+)"', text):
        named |= {f"{kind}.before_delete", f"{kind}.after_delete"}
    assert named == set(POINTS)


def test_a_store_imports_no_torch():
    program = (
        "import sys, kvstore.__main__; from kvstore.tiers import nixl; nixl.set_environment('lo')\n"
        "try: nixl.load()\nexcept ImportError: pass\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", program], timeout=60, cwd=SOURCES.parent, env=dict(os.environ)).returncode
        == 0
    )
