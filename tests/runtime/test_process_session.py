"""Processes in a session of their own: all of it ends, and nothing else does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from runtime.process_session import ProcessSession, end_left_behind

#: Starts a child that ignores SIGTERM, and says its pid.
_PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, 1); time.sleep(600)"])
open(sys.argv[1], "w").write(str(child.pid))
time.sleep(600)
"""


class Made:
    """A session, and its child's pid."""

    def __init__(self, folder: Path) -> None:
        self.record, said = folder / "record", folder / "child"
        command = [sys.executable, "-c", _PARENT, str(said)]
        self.session = ProcessSession.start(command, os.environ, self.record)
        end = time.monotonic() + 20
        while not (said.exists() and said.read_text()):
            assert time.monotonic() < end
            time.sleep(0.01)
        self.child = int(said.read_text())

    def living(self) -> list[int]:
        pids = (self.session.popen.pid, self.child)
        return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    session = Made(tmp_path)
    yield session
    session.session.kill()


def test_killing_ends_every_process_and_the_record(made: Made) -> None:
    assert len(made.living()) == 2
    made.session.kill()
    assert not made.living() and not made.record.exists()


def test_what_is_left_behind_is_ended_though_its_first_process_is_gone(made: Made) -> None:
    made.session.popen.kill()
    made.session.popen.wait()
    assert made.living() == [made.child]
    assert end_left_behind(made.record) == 1
    assert not made.living() and not made.record.exists()
    assert end_left_behind(made.record) == 0


def test_a_record_of_another_run_of_the_machine_ends_nothing(made: Made) -> None:
    said = json.loads(made.record.read_text())
    made.record.write_text(json.dumps(said | {"boot": "another"}))
    assert end_left_behind(made.record) == 0 and len(made.living()) == 2


def test_processes_that_began_after_the_record_are_somebody_elses(made: Made) -> None:
    before = time.time() - 3600
    os.utime(made.record, (before, before))
    assert end_left_behind(made.record) == 0 and len(made.living()) == 2


def test_a_session_that_runs_long_stays_its_own(made: Made) -> None:
    before = time.time() - 3600
    os.utime(made.record, (before, before))
    made.session.touch()
    assert end_left_behind(made.record) == 2


@pytest.mark.parametrize("text", ["", "{", "[]", '{"session": "x", "boot": ""}', '{"session": 1}', '{"boot": "x"}'])
def test_a_record_that_makes_no_sense_ends_nothing(tmp_path: Path, text: str) -> None:
    record = tmp_path / "record"
    record.write_text(text)
    assert end_left_behind(record) == 0


def test_what_it_makes_is_its_users_only_and_it_ends_with_its_starter(tmp_path: Path) -> None:
    starter = (
        "import os, sys, time\nfrom pathlib import Path\nfrom runtime.process_session import ProcessSession\n"
        "code = 'import sys, time; open(sys.argv[1], \"w\"); time.sleep(600)'\n"
        "made = ProcessSession.start([sys.executable, '-c', code, sys.argv[1]], os.environ, Path(sys.argv[2]))\n"
        "print(made.popen.pid, flush=True)\ntime.sleep(600)\n"
    )
    file, record = tmp_path / "made", tmp_path / "record"
    process = subprocess.Popen([sys.executable, "-c", starter, str(file), str(record)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    end = time.monotonic() + 20
    while not file.exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    assert file.stat().st_mode & 0o077 == 0
    process.kill()
    process.wait()
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end, "it gets SIGTERM"
        time.sleep(0.01)
