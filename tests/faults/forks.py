"""Stores with a wrong wall clock, as processes of their own or as forks of one that has imported everything."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from tests.kvstore.conftest import Stack

PROGRAM, ROOT = Path(__file__).with_name("store_program.py"), Path(__file__).parents[2]
_START_S = 60.0


class Forked:
    """A fork, with what `subprocess.Popen` has of it."""

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None
        self._ended = threading.Event()

    def ended(self, status: int) -> None:
        self.returncode = status
        self._ended.set()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("a forked store", timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forks:
    """The process that forks."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM), "--forks"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self._running: dict[int, Forked] = {}
        self._started: queue.SimpleQueue[Forked] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            if "status" in said:
                self._running.pop(said["pid"]).ended(said["status"])
            else:
                made = self._running[said["pid"]] = Forked(said["pid"])
                self._started.put(made)

    def start(self, argv: list[str], env: dict[str, str], log: Path) -> Forked:
        assert self._process.stdin is not None
        self._process.stdin.write((json.dumps({"argv": argv, "env": env, "log": str(log)}) + "\n").encode())
        self._process.stdin.flush()
        return self._started.get(timeout=_START_S)

    def stop(self) -> None:
        """End it; its forks have ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(_START_S)


class ClockedStack(Stack):
    """Stores whose wall clocks a test sets. forks: what they are forked from; None: each is started anew."""

    forks: Forks | None = None
    wall_days = 0

    def start(self, node: int, environment: Mapping[str, str] | None = None) -> None:
        argv = ["--config", str(self.file), "--node", str(node)]
        env = {
            **os.environ,
            **(environment or {}),
            "UPBEAT_TEST_WALL_DAYS": str(self.wall_days),
            "PYTHONPATH": str(ROOT),
        }
        log = self.file.with_name(f"kvstore-{node}.log")
        if self.forks is not None:
            self.processes[node] = self.forks.start(argv, env, log)  # type: ignore[assignment]
            return
        with log.open("ab") as out:
            self.processes[node] = subprocess.Popen(
                [sys.executable, str(PROGRAM), *argv], stdout=out, stderr=out, cwd=ROOT, env=env
            )
