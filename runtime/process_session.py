"""A program with processes of its own, in a session of its own that ends as a whole: a vLLM server.

A vLLM server's engine processes outlive it when it is killed. So the session is recorded in a file, and what an earlier
run has left is ended before the next one starts.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1
#: Looked up before any fork.
_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
#: A process that began so many seconds after the record was last touched is not of that session: its number was used
#: again.
_SLACK_S = 10.0
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class ProcessSession:
    """A started program. popen: its first process. record: the file that names its session."""

    popen: subprocess.Popen[bytes]
    record: Path

    @classmethod
    def start(cls, command: Sequence[str], environment: Mapping[str, str], record: Path) -> ProcessSession:
        """Start it. If this process is killed, its first process gets SIGTERM. What it and its processes create is for
        this user only. Call it in the main thread. Raises OSError."""
        parent = os.getpid()
        popen = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            env=dict(environment),
            start_new_session=True,
            preexec_fn=lambda: _before_exec(parent),
        )
        record.write_text(json.dumps({"session": popen.pid, "boot": _boot()}))
        return cls(popen, record)

    def touch(self) -> None:
        """Note that it runs now: its record stays valid for processes that it starts later."""
        with contextlib.suppress(OSError):
            self.record.touch()

    def terminate(self) -> None:
        """Ask it to end."""
        with contextlib.suppress(ProcessLookupError):
            self.popen.terminate()

    def kill(self) -> None:
        """End what is left of it, and wait for that. Removes the record."""
        _kill_session(self.popen.pid, float("inf"))
        self.popen.wait()
        self.record.unlink(missing_ok=True)


def end_left_behind(record: Path) -> int:
    """End the processes of the session that `record` names, if some live, and remove the record. Returns how many there
    were. Only processes of this user that began before the record was last touched."""
    try:
        said = json.loads(record.read_text())
        session, boot, touched_s = int(said["session"]), str(said["boot"]), record.stat().st_mtime
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    ended = _kill_session(session, touched_s + _SLACK_S) if boot == _boot() and session > 1 else 0
    record.unlink(missing_ok=True)
    return ended


def _kill_session(session: int, began_before_s: float) -> int:
    """SIGKILL to every process of the session, until none is left. Returns how many there were."""
    killed: set[int] = set()
    while found := _members(session, began_before_s):
        for process in found:
            killed.add(process.pid)
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(_LOOK_S)
    return len(killed)


def _members(session: int, began_before_s: float) -> list[psutil.Process]:
    """Living processes of this user in the session that began before a time since the epoch."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            mine = process.uids().effective == os.geteuid() and os.getsid(process.pid) == session
            if mine and process.create_time() <= began_before_s and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _boot() -> str:
    """Names the machine's present run; process numbers mean nothing in another one."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _before_exec(parent: int) -> None:
    os.umask(0o077)
    if _PRCTL is not None:
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
