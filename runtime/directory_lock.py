"""One process at a time for a node's directory, also between containers that share the volume: `flock` on a file in it.

The kernel releases the lock when the process ends. The file stays and names the last holder: pid and host as that
process saw them. `flock` works between hosts on NFS 4; on file systems without locks taking one raises OSError.
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

#: Time for a previous holder that is shutting down.
WAIT_S = 2.0
_LOOK_S = 0.05


class DirectoryLock:
    """See the module. path: the lock's file. For the error message, who: the kind of process; number: the setting that
    gives a process another directory."""

    def __init__(self, path: Path, who: str, number: str = "node number (--node)") -> None:
        self.path, self._who, self._number = path, who, number
        self._fd = -1

    def take(self, wait_s: float = WAIT_S) -> None:
        """Holds the lock until `release` or the end of the process; no effect when this object holds it. Blocks at most
        `wait_s`.

        Raises ConfigError naming the holder when another process has it, OSError when the directory or its locks cannot
        be used.
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
                        f"{self.path.parent} is in use by another {self._who} ({self._holder(fd)}); stop that one, "
                        "or give this one "
                        f"another data directory (data) or {self._number}"
                    )
                time.sleep(_LOOK_S)
            self._say(fd)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd

    def release(self) -> None:
        """Releases the lock."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> int:
        try:
            return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except OSError:
            # On a full or read-only disk, an existing file can still be locked.
            return os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW)

    def _say(self, fd: int) -> None:
        said = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        with contextlib.suppress(OSError):  # the lock is valid without the text
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
