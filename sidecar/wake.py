"""The socket on which the connector says that its engine is idle and must step (vllm-plugin, `scheduler_side`).

An idle vLLM engine sleeps until a request comes, and only then evicts the blocks of a session that was erased. Any
message means the same, and nothing is answered. The directory keeps other users out.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from pathlib import Path

#: Messages read at a time; more say nothing new.
_MOST = 64


class WakeSocket:
    """See the module."""

    def __init__(self, path: Path, woken: Callable[[], None]) -> None:
        """woken: called on the event loop for one or more messages. Raises OSError."""
        self._path, self._woken = path, woken
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        path.chmod(0o600)
        self._socket.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._read)

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            for _ in range(_MOST):
                self._socket.recv(16)
        self._woken()

    def close(self) -> None:
        """Stop listening."""
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        self._path.unlink(missing_ok=True)
