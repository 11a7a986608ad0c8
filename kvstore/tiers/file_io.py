"""How file ranges get into the arena and out of it: NIXL's POSIX or GDS backend, or preadv and pwritev.

One seam, two implementations, one conformance suite (tests/kvstore/test_tiers.py). A transfer is begun and then asked whether it
has ended, so that one thread keeps many under way; `read` and `write` wait for one. Each instance is used by one thread at a
time (`threads` says by how many it may be).

Where a file is open with O_DIRECT, offsets and lengths are multiples of 4096: so are slots, and pieces in a file (`direct_works`).
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

#: What one call may move at most, by the kernel's limit on vectors.
_IOV_MAX = 1024
#: Between two looks at a transfer.
POLL_S = 0.00005
_BLOCK = 4096


class Part(NamedTuple):
    """`length` bytes at `file_offset` of a file and at `arena_offset` of the arena."""

    file_offset: int
    arena_offset: int
    length: int


class Moving(Protocol):
    """A transfer that was begun."""

    def ended(self) -> bool:
        """Whether nothing moves any more; not to be asked again after that. Raises OSError when it failed: then too nothing moves."""
        ...


class FileIo(abc.ABC):
    """See the module. `threads`: how many threads may call at the same time. `depth`: reads or writes that each should have under way.
    `joined_bytes`: short reads are joined to one transfer up to so much."""

    threads: int
    depth: int
    joined_bytes = 0

    @abc.abstractmethod
    def begin(self, operation: Operation, fd: int, parts: Sequence[Part], header: bytes = b"") -> Moving:
        """Start to move `parts` (READ: file to arena), and when writing `header` to the file's beginning.

        Raises PieceLost when a file that is read is too short, OSError when it cannot be moved.
        """

    def begin_joined(self, reads: Sequence[tuple[int, Sequence[Part]]]) -> Moving:
        """Start to read parts of several files as one transfer, each file at least as long as its parts want. Raises OSError, and its
        `ended` does, when any of it cannot be moved; which is not known."""
        for fd, parts in reads:
            self.begin("READ", fd, parts)
        return _Moved()

    def read(self, fd: int, parts: Sequence[Part]) -> None:
        """File to arena. Raises PieceLost when the file is too short, OSError when it cannot be read."""
        _wait(self.begin("READ", fd, parts))

    def write(self, fd: int, parts: Sequence[Part], header: bytes = b"") -> None:
        """Arena to file. Raises OSError."""
        _wait(self.begin("WRITE", fd, parts, header))


def _wait(moving: Moving) -> None:
    while not moving.ended():
        time.sleep(POLL_S)


class _Moved:
    """It was done when it was begun."""

    def ended(self) -> bool:
        return True


class ThreadFileIo(FileIo):
    """preadv and pwritev: neighbouring ranges of the file are one call."""

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
    """A copy that begins a page, as O_DIRECT wants it."""
    pages = mmap.mmap(-1, len(data))
    pages[:] = data
    return pages


class NixlFileIo(FileIo):
    """NIXL's POSIX backend (the kernel's asynchronous I/O), or GDS, which reads into device memory's neighbourhood without a copy."""

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
        except Exception:  # NIXL's errors have no base of their own
            moving.failed()
        return moving

    def again(self, operation: Operation, fd: int, parts: Sequence[Part], header: bytes) -> None:
        """Move it by plain calls, as NIXL could not: succeeds, or raises the OSError that says why."""
        try:
            self._direct.begin(operation, fd, parts, header)
        except PieceLost as e:
            raise OSError(errno.EIO, "the file became shorter") from e


class _NixlMoving:
    """One transfer. `files`: descriptors and what is moved of each; `header` goes to the beginning of the first."""

    __slots__ = ("_agent", "_done", "_files", "_handle", "_header", "_io", "_operation", "_registered")

    def __init__(self, io: NixlFileIo, operation: Operation, files: Sequence[tuple[int, Sequence[Part]]], header: bytes) -> None:
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
            # The address of a page that `pages` keeps mapped until the transfer has ended.
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
        """NIXL gave up; it says no errno. Raises OSError when the bytes cannot be moved without it either, or when more than one file is
        concerned: then each is better tried by itself."""
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
    """Raises PieceLost when the file is too short for what is to be read of it."""
    if os.fstat(fd).st_size < max(p.file_offset + p.length for p in parts):
        raise PieceLost("short file")


def _address(pages: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(pages))


def make_file_io(choice: str, arena: Arena, name: str) -> FileIo:
    """The implementation that `kv.file_io` chooses; "auto" is NIXL where it works. Raises ConfigError for "nixl" and "gds"."""
    if choice == "threads":
        return ThreadFileIo(arena)
    try:
        return NixlFileIo(arena, name, "GDS" if choice == "gds" else "POSIX")
    except Exception as e:
        if choice != "auto":
            needs = "; it needs NVIDIA's cuFile library and driver" if choice == "gds" else ""
            raise ConfigError(f"kv.file_io = {choice!r} does not work here: {e}{needs}; set kv.file_io: auto or threads") from e
        return ThreadFileIo(arena)


def direct_works(folder: Path) -> bool:
    """Whether files there can be read and written past the page cache, at multiples of 4096. Raises OSError when that cannot be tried,
    as on a disk that is read-only or full."""
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
