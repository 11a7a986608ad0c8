"""The child's side of `runtime.children`: limits its own memory and answers its parent's calls until the parent ends.

Imports little, because every child pays for imports in time and memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable
from typing import BinaryIO

#: A frame is its length, then its bytes.
LENGTH = struct.Struct("<Q")
#: The first frame: the memory limit in bytes, then the setup.
LIMITS = struct.Struct("<Q")
_PR_SET_PDEATHSIG = 1


def serve(handler: Callable[[bytes], bytes], begin: Callable[[bytes], None] | None = None) -> None:
    """Answers the parent's calls until it ends. `begin` gets the setup first, before the memory limit applies.

    An exception from `handler` ends the process, and the caller gets ChildDied; expected refusals are return values.
    Prints go to stderr.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the parent ends its children
    _end_with_parent()
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    hello = _read(source)
    if hello is None:
        return
    (memory_bytes,) = LIMITS.unpack_from(hello)
    if begin is not None:
        begin(hello[LIMITS.size :])
    del hello
    _limit(memory_bytes)
    with contextlib.suppress(BrokenPipeError):
        _write(sink, b"")
        while (payload := _read(source)) is not None:
            answer = handler(payload)
            del payload
            _write(sink, answer)


def _read(source: BinaryIO) -> bytes | None:
    """A frame; None when the parent has closed its end."""
    header = source.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(header)
    payload = source.read(length)
    return payload if len(payload) == length else None


def _write(sink: BinaryIO, payload: bytes) -> None:
    sink.write(LENGTH.pack(len(payload)))
    sink.write(payload)
    sink.flush()


def _end_with_parent() -> None:
    """Linux: the kernel kills this process when the parent's thread that started it ends. Elsewhere stdin ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _limit(memory_bytes: int) -> None:
    with contextlib.suppress(OSError, ValueError):  # not on every system
        with open("/proc/self/statm") as f:
            most = int(f.read().split()[0]) * resource.getpagesize() + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core dumps: they would contain callers' data
    if sys.platform == "linux":
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as f:
            f.write("1000")
