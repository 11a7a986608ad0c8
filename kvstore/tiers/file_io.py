"""How file ranges get into the arena and out of it: NIXL's POSIX backend, or preadv and pwritev.

One seam, two implementations, one conformance suite (tests/kvstore/test_file_io.py). Calls block; each instance is used by
one thread at a time (`threads` says by how many it may be).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from contracts.errors import ConfigError, PieceLost
from kvstore.tiers import nixl
from kvstore.tiers.arena import Arena

#: What one call may move at most, by the kernel's limit on vectors.
_IOV_MAX = 1024
_NIXL_TIMEOUT_S = 30.0


class Part(NamedTuple):
    """`length` bytes at `file_offset` of a file and at `arena_offset` of the arena."""

    file_offset: int
    arena_offset: int
    length: int


class FileIo(Protocol):
    """See the module. `threads`: how many threads may call at the same time."""

    threads: int

    def read(self, fd: int, parts: Sequence[Part]) -> None:
        """File to arena. Raises PieceLost when the file is too short, OSError when it cannot be read."""
        ...

    def write(self, fd: int, parts: Sequence[Part]) -> None:
        """Arena to file. Raises OSError."""
        ...


class ThreadFileIo:
    """preadv and pwritev: neighbouring ranges of the file are one call."""

    threads = 4

    def __init__(self, arena: Arena) -> None:
        self._view = arena.view

    def read(self, fd: int, parts: Sequence[Part]) -> None:
        for run in _runs(parts):
            self._move(os.preadv, fd, run)

    def write(self, fd: int, parts: Sequence[Part]) -> None:
        for run in _runs(parts):
            self._move(os.pwritev, fd, run)

    def _move(self, call: Any, fd: int, run: list[Part]) -> None:
        position = run[0].file_offset
        views = [self._view[p.arena_offset : p.arena_offset + p.length] for p in run]
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
        if last is not None and last.file_offset + last.length == part.file_offset and len(runs[-1]) < _IOV_MAX:
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


class NixlFileIo:
    """NIXL's POSIX backend (asynchronous I/O of the kernel or the C library underneath)."""

    threads = 1

    def __init__(self, arena: Arena, name: str) -> None:
        """Raises ImportError where NIXL is not installed, RuntimeError where it does not work."""
        api = nixl.load()
        self._arena = arena
        self._name = name
        self._agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=["POSIX"]))
        if "POSIX" not in self._agent.backends:
            raise RuntimeError("NIXL has no POSIX backend here")
        self._agent.register_memory([(arena.address, arena.size_bytes, 0, "")], "DRAM", backends=["POSIX"])

    def read(self, fd: int, parts: Sequence[Part]) -> None:
        end = max(p.file_offset + p.length for p in parts)
        if os.fstat(fd).st_size < end:
            raise PieceLost("short file")
        self._move("READ", fd, parts)

    def write(self, fd: int, parts: Sequence[Part]) -> None:
        self._move("WRITE", fd, parts)

    def _move(self, operation: str, fd: int, parts: Sequence[Part]) -> None:
        agent, base = self._agent, self._arena.address
        end = max(p.file_offset + p.length for p in parts)
        handle: Any = None
        registered = None
        try:
            registered = agent.register_memory([(0, end, fd, "")], "FILE", backends=["POSIX"])
            local = agent.get_xfer_descs([(base + p.arena_offset, p.length, 0) for p in parts], "DRAM")
            remote = agent.get_xfer_descs([(p.file_offset, p.length, fd) for p in parts], "FILE")
            handle = agent.initialize_xfer(operation, local, remote, self._name)
            state = agent.transfer(handle)
            deadline, pause = time.monotonic() + _NIXL_TIMEOUT_S, 0.00005
            while state == "PROC":
                time.sleep(pause)
                pause = min(pause * 2, 0.002)
                state = agent.check_xfer_state(handle)
                if time.monotonic() > deadline:
                    raise OSError(f"NIXL {operation} of a file takes too long")
            if state != "DONE":
                raise OSError(f"NIXL {operation} of a file: {state}")
        except OSError:
            raise
        except Exception as e:  # NIXL's errors have no base of their own
            raise OSError(f"NIXL {operation} of a file: {e}") from e
        finally:
            with contextlib.suppress(Exception):
                if handle is not None:
                    handle.release()
            with contextlib.suppress(Exception):
                if registered is not None:
                    agent.deregister_memory(registered)


def make_file_io(choice: str, arena: Arena, name: str) -> FileIo:
    """The implementation that `kv.file_io` chooses; "auto" is NIXL where it works. Raises ConfigError for "nixl"."""
    if choice == "threads":
        return ThreadFileIo(arena)
    try:
        return NixlFileIo(arena, name)
    except Exception as e:
        if choice == "nixl":
            raise ConfigError(f"kv.file_io = 'nixl' does not work here: {e}; set kv.file_io: auto or threads") from e
        return ThreadFileIo(arena)
