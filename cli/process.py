"""One child process of the launcher: how it is started, how its end is noticed, where its output goes."""

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
    """A started program. Belongs to the launcher's session and process group.

    The kernel sends it SIGTERM when the launcher's main thread ends, so it must be made in that thread. SIGINT and SIGHUP
    are not for it: they reach the whole group, and the launcher decides what follows.
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
        """log: where its output goes. output: what brings it there (`cli.logs`); None: it writes the file itself."""
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
        """Whether it has not ended yet."""
        return self._popen.poll() is None

    async def ended(self) -> int:
        """Wait for its end; the status as Popen has it, negative for a signal."""
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
        """Its status, once it has ended. Blocks: only for one that is sure to end."""
        return self._popen.wait()

    def send(self, number: signal.Signals) -> None:
        """Send a signal unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._popen.send_signal(number)


def log_end(log: Path, lines: int) -> list[str]:
    """The last non-empty `lines` of a log; fewer when it is shorter, none when it is not there."""
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
