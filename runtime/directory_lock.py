"""One process at a time for a node's directory, also where containers share the volume: `flock` on a file in it.

The lock ends with its process, however that ends. The file stays, and says who held it last: pid and host as that process saw them. `flock`
holds between hosts on NFS 4; where a file system has no locks taking one raises OSError.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from pathlib import Path

from contracts.errors import ConfigError

#: A predecessor that is just ending is waited for.
WAIT_S = 2.0
_LOOK_S = 0.05


class DirectoryLock:
    """See the module. `path`: the lock's file. For the message, `who`: what kind of process holds it; `number`: what it has of its own."""

    def __init__(self, path: Path, who: str, number: str = "node number (--node)") -> None:
        self.path, self._who, self._number = path, who, number
        self._fd = -1

    def take(self, wait_s: float = WAIT_S) -> None:
        """Hold the lock until `release` or the end of the process; nothing happens when it is held already. Blocks for `wait_s` at most.

        Raises ConfigError naming the holder when another process has it, OSError when the directory or its locks cannot be used.
        """
        if self._fd >= 0:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fd = self._open()
        try:
            deadline = time.monotonic() + wait_s
            while not _locked(fd):
                if time.monotonic() >= deadline:
                    raise ConfigError(
                        f"{self.path.parent} is in use by another {self._who} ({self._holder(fd)}); stop that one, or give this one "
                        f"another data directory (data) or {self._number}"
                    )
                time.sleep(_LOOK_S)
            self._say(fd)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd

    def release(self) -> None:
        """Let go of it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> int:
        try:
            return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except OSError:
            # A disk that is full or can only be read still says who uses it.
            return os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW)

    def _say(self, fd: int) -> None:
        said = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        with contextlib.suppress(OSError):  # the lock holds all the same
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps(said).encode() + b"\n", 0)

    def _holder(self, fd: int) -> str:
        try:
            said = json.loads(os.pread(fd, 4096, 0))
            return f"pid {int(said['pid'])} on host {str(said['host'])[:64]!r}, since {str(said['since'])[:32]}"
        except (OSError, ValueError, KeyError, TypeError):
            return "which one is not known"


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
