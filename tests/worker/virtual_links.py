"""Links to host memory on a machine that has none: copies at a fixed rate. They stand in for the PCIe links of GPUs."""

from __future__ import annotations

import ctypes
import threading
import time

from worker.models.filling import host_copy


class Pace:
    """Bytes per second of one link, shared by all who copy over it. Any thread."""

    def __init__(self, bytes_s: float) -> None:
        self.bytes_s = bytes_s
        self._free_at = 0.0
        self._lock = threading.Lock()

    def spend(self, bytes_: int) -> None:
        """Returns when the link has carried so many more bytes, in the order of calls."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + bytes_ / self.bytes_s
            left_s = self._free_at - time.monotonic()
        time.sleep(max(left_s, 0))

    def copy(self, to: int, source: int, bytes_: int) -> None:
        """A `worker.models.filling.Copy` over this link."""
        self.spend(bytes_)
        host_copy(to, source, bytes_)


class PacedLink:
    """`worker.models.other_links.Link`. fails_after: pieces that are staged before it fails; None: never."""

    def __init__(self, name: str, bytes_s: float, fails_after: int | None = None) -> None:
        self.name, self.pace, self.left = name, Pace(bytes_s), fails_after
        self.buffers = 0

    def buffer(self, bytes_: int) -> PacedBuffer:
        self.buffers += 1
        return PacedBuffer(self, bytes_)


class PacedBuffer:
    """`worker.models.other_links.Buffer`: host memory."""

    def __init__(self, link: PacedLink, bytes_: int) -> None:
        self._link, self._memory = link, (ctypes.c_ubyte * bytes_)()

    def stage(self, source: int, bytes_: int) -> None:
        if self._link.left is not None:
            if self._link.left == 0:
                raise OSError("the link is gone")
            self._link.left -= 1
        self._link.pace.spend(bytes_)
        ctypes.memmove(self._memory, source, bytes_)

    def deliver(self, to: int, bytes_: int) -> None:
        host_copy(to, ctypes.addressof(self._memory), bytes_)

    def close(self) -> None:
        self._link.buffers -= 1
