"""The process that writes the services' logs, from one pipe a service into rotated files. Started by `cli.logs`.

    python -I log_writer.py LIMIT_BYTES FILES CONTROL_FD [FD PATH]...

A file is rotated between two lines, before a line would exceed the limit. FILES are kept, the current one included.
The process ends when all pipes are closed, so it also writes the logs of services that outlive their launcher.
For each byte from the control socket it empties the pipes and echoes the byte. Uses the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
from pathlib import Path

_READ_BYTES = 1 << 18


def roll(log: Path, files: int) -> None:
    """Rename LOG to LOG.1, LOG.1 to LOG.2, and so on; delete the oldest. files: number to keep with a new LOG, at least
    2."""
    ages = [old.name.removeprefix(f"{log.name}.") for old in log.parent.glob(f"{log.name}.*")]
    for age in sorted((int(age) for age in ages if age.isdecimal()), reverse=True):
        if age >= files - 1:
            Path(f"{log}.{age}").unlink()
        else:
            Path(f"{log}.{age}").replace(f"{log}.{age + 1}")
    with contextlib.suppress(FileNotFoundError):
        log.replace(f"{log}.1")


class RollingLog:
    """One log. Invariant: a rotated file ends with a whole line, and only its last line may exceed the limit."""

    def __init__(self, path: Path, limit_bytes: int, files: int) -> None:
        """Appends to an existing file."""
        self._path, self._limit, self._files = path, limit_bytes, files
        self._lost_bytes = 0
        self._fd, self._size = _open(path)
        self._between_lines = not self._size or os.pread(self._fd, 1, self._size - 1) == b"\n"

    def write(self, data: bytes) -> None:
        """Write `data`, rotating as needed. Counts bytes that cannot be written, and writes the count later."""
        while data:
            room = self._limit - self._size
            if len(data) <= room:
                self._put(data)
                return
            whole = data.rfind(b"\n", 0, max(room, 0)) + 1
            if whole:  # some lines still fit
                self._put(data[:whole])
                self._roll()
            elif self._size and self._between_lines and self._roll():
                continue
            else:  # the rest of a line, or a line longer than a file
                whole = data.find(b"\n") + 1 or len(data)
                self._put(data[:whole])
            data = data[whole:]

    def _put(self, data: bytes) -> None:
        if self._lost_bytes and self._between_lines:
            note = f"{self._lost_bytes} bytes of log are missing here: they could not be written\n".encode()
            if self._written(note) == len(note):
                self._lost_bytes = 0
        done = self._written(data)
        self._lost_bytes += len(data) - done
        self._between_lines = data.endswith(b"\n")

    def _written(self, data: bytes) -> int:
        done = 0
        with contextlib.suppress(OSError):
            while done < len(data):
                done += os.write(self._fd, data[done:])
        self._size += done
        return done

    def _roll(self) -> bool:
        """Begin a new file. False if that fails: the old file goes on growing."""
        try:
            roll(self._path, self._files)
            fd, size = _open(self._path)
        except OSError:
            return False
        os.close(self._fd)
        self._fd, self._size, self._between_lines = fd, size, True
        return True


def _open(path: Path) -> tuple[int, int]:
    """An appending descriptor, and the file's size."""
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    return fd, os.fstat(fd).st_size


def main(limit_bytes: int, files: int, control: int, pipes: dict[int, Path]) -> None:
    """Write until every pipe is closed. pipes: log path by the pipe's reading end."""
    logs = {fd: RollingLog(path, limit_bytes, files) for fd, path in pipes.items()}
    poll = select.poll()
    for fd in (control, *logs):
        os.set_blocking(fd, False)
        poll.register(fd, select.POLLIN)
    while logs:
        for fd, _ in poll.poll():
            if fd == control:
                asked = _read(control)
                for each, log in logs.items():
                    while data := _read(each):
                        log.write(data)
                if asked:
                    with contextlib.suppress(OSError):
                        os.write(control, asked)
                elif asked is not None:
                    poll.unregister(control)  # the launcher has ended
            elif fd in logs:
                data = _read(fd)
                if data:
                    logs[fd].write(data)
                elif data is not None:
                    poll.unregister(fd)
                    del logs[fd]


def _read(fd: int) -> bytes | None:
    """Available bytes; empty at the end of the pipe, None if none are available now."""
    try:
        return os.read(fd, _READ_BYTES)
    except BlockingIOError:
        return None
    except OSError:
        return b""


if __name__ == "__main__":
    words = sys.argv[4:]
    main(
        int(sys.argv[1]),
        int(sys.argv[2]),
        int(sys.argv[3]),
        {int(fd): Path(path) for fd, path in zip(words[::2], words[1::2], strict=True)},
    )
