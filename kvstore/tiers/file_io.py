"""Moves ranges between files and the arena: by NIXL's POSIX or GDS backend, or by preadv and pwritev.

One interface, two implementations, one conformance suite (tests/kvstore/test_file_io.py). A transfer is begun and then
polled, so that one thread keeps many in flight; `read` and `write` wait for one. At most `threads` threads use an
instance at a time.

Where a file is open with O_DIRECT, offsets and lengths are multiples of 4096; slots and pieces in files are
(`direct_works`).
"""

from __future__ import annotations

import abc
import contextlib
import ctypes
import errno
import mmap
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from contracts.errors import ConfigError, PieceLost
from kvstore.tiers import nixl
from kvstore.tiers.arena import Arena
from kvstore.tiers.contiguous import joined

Operation = Literal["READ", "WRITE"]

#: The kernel's limit on vectors of one call.
_IOV_MAX = 1024
#: Pause between two polls of a transfer.
POLL_S = 0.00005
_BLOCK = 4096


class Part(NamedTuple):
    """`length` bytes at `file_offset` of a file and at `arena_offset` of the arena."""

    file_offset: int
    arena_offset: int
    length: int


class Moving(Protocol):
    """A transfer in progress."""

    def ended(self) -> bool:
        """Whether the transfer has ended; not to be called again after that. Raises OSError when it failed; nothing
        moves then either."""
        ...


class FileIo(abc.ABC):
    """See the module. threads: threads that may call at the same time. depth: transfers that each thread should keep in
    flight. joined_bytes: short reads are joined up to this size."""

    threads: int
    depth: int
    joined_bytes = 0

    @abc.abstractmethod
    def begin(self, operation: Operation, fd: int, parts: Sequence[Part], header: bytes = b"") -> Moving:
        """Begin to move `parts` (READ: file to arena). A write also puts `header` at the file's beginning.

        Raises PieceLost when a file to read is too short, OSError when the transfer cannot begin.
        """

    def begin_joined(self, reads: Sequence[tuple[int, Sequence[Part]]]) -> Moving:
        """Begin to read parts of several files as one transfer; each file must be long enough. Raises OSError, and so
        does its `ended`, when any part fails; which one is unknown."""
        for fd, parts in reads:
            self.begin("READ", fd, parts)
        return _Moved()

    def read(self, fd: int, parts: Sequence[Part]) -> None:
        """Read into the arena. Raises PieceLost when the file is too short, OSError when it cannot be read."""
        _wait(self.begin("READ", fd, parts))

    def write(self, fd: int, parts: Sequence[Part], header: bytes = b"") -> None:
        """Write from the arena. Raises OSError."""
        _wait(self.begin("WRITE", fd, parts, header))


def _wait(moving: Moving) -> None:
    while not moving.ended():
        time.sleep(POLL_S)


class _Moved:
    """A transfer that ended as it began."""

    def ended(self) -> bool:
        return True


class ThreadFileIo(FileIo):
    """preadv and pwritev; adjacent ranges of the file take one call."""

    threads = 4
    depth = 1

    def __init__(self, arena: Arena) -> None:
        self._view = arena.view

    def begin(self, operation: Operation, fd: int, parts: Sequence[Part], header: bytes = b"") -> Moving:
        call: Any = os.preadv if operation == "READ" else os.pwritev
        for run in _runs(parts):
            views = [self._view[p.arena_offset : p.arena_offset + p.length] for p in run]
            position = run[0].file_offset
            if header and position == len(header):
                views.insert(0, memoryview(_aligned(header)))
                position, header = 0, b""
            _move(call, fd, views, position)
        if header:
            _move(call, fd, [memoryview(_aligned(header))], 0)
        return _Moved()


def _move(call: Any, fd: int, views: list[memoryview], position: int) -> None:
    while views:
        moved = call(fd, views, position)
        if moved == 0:
            raise PieceLost("short file")
        position += moved
        while views and moved >= len(views[0]):
            moved -= len(views.pop(0))
        if moved:
            views[0] = views[0][moved:]


def _runs(parts: Sequence[Part]) -> list[list[Part]]:
    runs: list[list[Part]] = []
    for part in parts:
        last = runs[-1][-1] if runs else None
        if last is not None and last.file_offset + last.length == part.file_offset and len(runs[-1]) < _IOV_MAX - 1:
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def _aligned(data: bytes) -> mmap.mmap:
    """A page-aligned copy, as O_DIRECT requires."""
    pages = mmap.mmap(-1, len(data))
    pages[:] = data
    return pages


class NixlFileIo(FileIo):
    """NIXL's POSIX backend (the kernel's asynchronous I/O), or GDS."""

    threads = 1
    depth = 16
    joined_bytes = 1 << 20

    def __init__(self, arena: Arena, name: str, backend: str = "POSIX") -> None:
        """Raises ImportError where NIXL is not installed, RuntimeError where it does not work."""
        api = nixl.load()
        self._arena = arena
        self._name = name
        self._backends = [backend]
        self._agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=self._backends))
        if backend not in self._agent.backends:
            raise RuntimeError(f"NIXL has no {backend} backend here")
        self._agent.register_memory([(arena.address, arena.size_bytes, 0, "")], "DRAM", backends=self._backends)
        self._direct = ThreadFileIo(arena)

    def begin(self, operation: Operation, fd: int, parts: Sequence[Part], header: bytes = b"") -> Moving:
        if operation == "READ":
            check_length(fd, parts)
        return self._begin(_NixlMoving(self, operation, [(fd, parts)], header))

    def begin_joined(self, reads: Sequence[tuple[int, Sequence[Part]]]) -> Moving:
        return self._begin(_NixlMoving(self, "READ", reads, b""))

    def _begin(self, moving: _NixlMoving) -> Moving:
        try:
            moving.start(self._agent, self._arena.address, self._name, self._backends)
        except Exception:  # NIXL's errors have no common base class
            moving.failed()
        return moving

    def again(self, operation: Operation, fd: int, parts: Sequence[Part], header: bytes) -> None:
        """Move the bytes by plain calls after NIXL failed. Raises the OSError that says why."""
        try:
            self._direct.begin(operation, fd, parts, header)
        except PieceLost as e:
            raise OSError(errno.EIO, "the file became shorter") from e


class _NixlMoving:
    """One transfer. files: descriptors and the parts of each. `header` goes to the beginning of the first."""

    __slots__ = ("_agent", "_done", "_files", "_handle", "_header", "_io", "_operation", "_registered")

    def __init__(
        self, io: NixlFileIo, operation: Operation, files: Sequence[tuple[int, Sequence[Part]]], header: bytes
    ) -> None:
        self._io = io
        self._operation = operation
        self._files = files
        self._header = header
        self._agent: Any = None
        self._handle: Any = None
        self._registered: list[Any] = []
        self._done = False

    def start(self, agent: Any, base: int, name: str, backends: list[str]) -> None:
        self._agent = agent
        local: list[tuple[int, int, int]] = []
        remote: list[tuple[int, int, int]] = []
        files: list[tuple[int, int, int, str]] = []
        if self._header:
            length, fd = len(self._header), self._files[0][0]
            pages = _aligned(self._header)
            # `pages` keeps the page mapped until the transfer has ended.
            address = _address(pages)
            self._registered.append(agent.register_memory([(address, length, 0, "")], "DRAM", backends=backends))
            self._registered.append(pages)
            local.append((address, length, 0))
            remote.append((0, length, fd))
        for fd, parts in self._files:
            for file_offset, arena_offset, length in joined(parts):
                local.append((base + arena_offset, length, 0))
                remote.append((file_offset, length, fd))
            files.append((0, max(p.file_offset + p.length for p in parts), fd, ""))
        self._registered.append(agent.register_memory(files, "FILE", backends=backends))
        sources, targets = agent.get_xfer_descs(local, "DRAM"), agent.get_xfer_descs(remote, "FILE")
        self._handle = agent.initialize_xfer(self._operation, sources, targets, name)
        self._note(agent.transfer(self._handle))

    def _note(self, state: str) -> None:
        if state == "DONE":
            self._release()
            self._done = True
        elif state != "PROC":
            self.failed()

    def failed(self) -> None:
        """NIXL failed, without an errno: try plain calls. Raises OSError when they fail too, or when several files are
        joined: each is then better tried alone."""
        self._release()
        if len(self._files) > 1:
            raise OSError(errno.EIO, "a transfer of several files failed")
        self._io.again(self._operation, *self._files[0], self._header)
        self._done = True

    def ended(self) -> bool:
        if not self._done:
            try:
                state = self._agent.check_xfer_state(self._handle)
            except Exception:
                state = "ERR"
            self._note(state)
        return self._done

    def _release(self) -> None:
        with contextlib.suppress(Exception):
            if self._handle is not None:
                self._handle.release()
        for registered in self._registered:
            if not isinstance(registered, mmap.mmap):
                with contextlib.suppress(Exception):
                    self._agent.deregister_memory(registered)
        self._handle, self._registered = None, []


def check_length(fd: int, parts: Sequence[Part]) -> None:
    """Raises PieceLost when the file is too short for these parts."""
    if os.fstat(fd).st_size < max(p.file_offset + p.length for p in parts):
        raise PieceLost("short file")


def _address(pages: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(pages))


def make_file_io(choice: str, arena: Arena, name: str) -> FileIo:
    """The implementation that `kv.file_io` chooses; "auto" is NIXL where it works. Raises ConfigError when "nixl" or
    "gds" does not work."""
    if choice == "threads":
        return ThreadFileIo(arena)
    try:
        return NixlFileIo(arena, name, "GDS" if choice == "gds" else "POSIX")
    except Exception as e:
        if choice != "auto":
            needs = "; it needs NVIDIA's cuFile library and driver" if choice == "gds" else ""
            raise ConfigError(
                f"kv.file_io = {choice!r} does not work here: {e}{needs}; set kv.file_io: auto or threads"
            ) from e
        return ThreadFileIo(arena)


def direct_works(folder: Path) -> bool:
    """Whether files in the folder support O_DIRECT at multiples of 4096. Raises OSError when that cannot be tested, as
    on a read-only or full disk."""
    path = folder / f".direct-{os.getpid()}.part"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_DIRECT, 0o600)
    except OSError as e:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        if e.errno != errno.EINVAL:
            raise
        return False
    try:
        page = _aligned(bytes(_BLOCK))
        return os.pwritev(fd, [page], _BLOCK) == _BLOCK and os.preadv(fd, [page], _BLOCK) == _BLOCK
    except OSError as e:
        if e.errno != errno.EINVAL:
            raise
        return False
    finally:
        os.close(fd)
        path.unlink(missing_ok=True)
