"""The launcher's side of the services' logs: a pipe a service, and the process that writes them to files.

A separate process writes, so that the logs of services that outlive a killed launcher are kept. Both ends of every pipe
stay open here: a restarted service continues its log, and if the writer dies, a new one continues with what the pipes
hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from cli import log_writer
from cli.log_writer import roll

#: Capacity of a pipe: a service blocks when it has written more before the writer runs.
_PIPE_BYTES = 1 << 20
_SETTLE_S, _END_S = 2.0, 10.0
_AGAIN_S = 0.2


class Logs:
    """The logs of one stack's services. Used in the launcher's event loop."""

    def __init__(
        self, directory: Path, limit_bytes: int, files: int, keep_open: Sequence[int], say: Callable[[str], None]
    ) -> None:
        """keep_open: descriptors that the writer inherits (the launcher's locks). say: prints a line when the writer is
        replaced."""
        self._directory, self._limit, self._files = directory, limit_bytes, files
        self._keep_open, self._say = tuple(keep_open), say
        self._pipes: dict[str, tuple[int, int]] = {}
        self._asking = asyncio.Lock()
        self._asked = 0
        self._watch: asyncio.Task[None] | None = None

    def open(self, names: Iterable[str]) -> None:
        """Begin a log for each of `names`, rotating those of earlier runs, and start the writer. Raises OSError."""
        self._directory.mkdir(parents=True, exist_ok=True)
        for log in self._directory.glob("*.log"):
            roll(log, self._files)
        for name in names:
            reading, writing = os.pipe()
            with contextlib.suppress(OSError):  # above the user's limit: the pipe keeps its size
                fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            self._pipes[name] = (reading, writing)
        self._start()
        self._watch = asyncio.create_task(self._replace(), name="log writer")

    def path(self, name: str) -> Path:
        """The current log file of a service."""
        return self._directory / f"{name}.log"

    def output(self, name: str) -> int:
        """The descriptor for a service's standard output and standard error."""
        return self._pipes[name][1]

    async def settled(self) -> None:
        """Return when all output so far is in the files, or after two seconds."""
        async with self._asking:
            loop = asyncio.get_running_loop()
            self._asked = (self._asked + 1) % 256
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(_SETTLE_S):
                    await loop.sock_sendall(self._control, bytes([self._asked]))
                    while (answer := await loop.sock_recv(self._control, 256)) and answer[-1] != self._asked:
                        pass  # a late answer to an earlier request

    async def close(self) -> None:
        """Let the writer finish. All services must have ended."""
        if self._watch is None:
            return
        self._watch.cancel()
        await asyncio.gather(self._watch, return_exceptions=True)
        for ends in self._pipes.values():
            for fd in ends:
                os.close(fd)
        self._control.close()
        try:
            await asyncio.to_thread(self._writer.wait, _END_S)
        except subprocess.TimeoutExpired:  # a process outside the stack holds a pipe
            self._writer.kill()
            self._writer.wait()

    def _start(self) -> None:
        self._control, far_end = socket.socketpair()
        self._control.setblocking(False)
        reading = {fds[0]: self.path(name) for name, fds in self._pipes.items()}
        words = [word for fd, path in reading.items() for word in (str(fd), str(path))]
        with far_end:
            self._writer = subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    log_writer.__file__,
                    str(self._limit),
                    str(self._files),
                    str(far_end.fileno()),
                    *words,
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={},  # it needs none of the launcher's, and nothing secret
                pass_fds=(far_end.fileno(), *reading, *self._keep_open),
                preexec_fn=_ignore_signals,
            )

    async def _replace(self) -> None:
        while True:
            await asyncio.sleep(_AGAIN_S)
            if (status := self._writer.poll()) is not None:
                self._say(f"what writes the logs ended with status {status}; starting it again")
                async with self._asking:
                    self._control.close()
                    self._start()


def _ignore_signals() -> None:
    """Leave signals to the process group to the launcher; the writer ends after the services."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
