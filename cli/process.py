"""One child process of the launcher: starting it, waiting for its end, and its output."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
#: Looked up before any fork: nothing may be imported or loaded between fork and exec.
_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)
_LOG_END_BYTES = 16_384


class Process:
    """A started program, in the launcher's session and process group.

    Create it in the launcher's main thread: the kernel sends it SIGTERM when that thread ends. It ignores SIGINT and
    SIGHUP, which reach the whole group; the launcher decides what follows.
    """

    def __init__(
        self,
        program: Path,
        arguments: Sequence[str],
        *,
        log: Path,
        environment: dict[str, str],
        keep_open: Sequence[int],
        output: int | None = None,
    ) -> None:
        """log: file of its output. output: descriptor of the pipe to that file (`cli.logs`); None: it writes
        directly."""
        self.log = log
        self.started_s = time.monotonic()
        launcher = os.getpid()
        with log.open("ab") if output is None else contextlib.nullcontext(output) as stdout:
            self._popen = subprocess.Popen(
                [str(program), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=keep_open,
                preexec_fn=lambda: _before_exec(launcher),
            )
        self.pid = self._popen.pid

    @property
    def running(self) -> bool:
        """Whether it still runs."""
        return self._popen.poll() is None

    async def ended(self) -> int:
        """Wait for its end. Returns Popen's status: negative for a signal."""
        loop = asyncio.get_running_loop()
        end = asyncio.Event()
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return self._popen.wait()
        try:
            loop.add_reader(fd, end.set)
            await end.wait()
        finally:
            loop.remove_reader(fd)
            os.close(fd)
        return self._popen.wait()

    def wait(self) -> int:
        """Block until it ends; returns its status."""
        return self._popen.wait()

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            self._popen.send_signal(number)


def log_end(log: Path, lines: int) -> list[str]:
    """At most the last `lines` non-empty lines of a log; none if the file does not exist."""
    try:
        with log.open("rb") as f:
            f.seek(0, os.SEEK_END)
            f.seek(max(0, f.tell() - _LOG_END_BYTES))
            text = f.read().decode(errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-lines:]


def _before_exec(launcher: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if _PRCTL is not None:
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != launcher:
        os._exit(1)
