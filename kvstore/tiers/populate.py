"""Populates pages of the arena before they are used, so that loads do not wait for the kernel to clear them (0.5 s a
GiB).

A thread stays ahead of the highest byte ever used, so a store that holds little takes little memory. Before Linux 5.14
pages are populated when they are touched.
"""

from __future__ import annotations

import ctypes
import os
import threading

from runtime import telemetry

log = telemetry.logger("kvstore.populate")

_MADV_POPULATE_WRITE = 23  #: <linux/mman.h>; the mmap module does not name it.
#: How far ahead: what a burst of loads takes before the thread, which is faster than any tier, has more.
_AHEAD_BYTES = 256 << 20
#: Short steps, so that closing never waits long.
_STEP_BYTES = 4 << 20

_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Populating:
    """Populates `size_bytes` of writable memory at `address`, which is page-aligned, up to some way past what is used.
    made_bytes: populated so far."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self._address = address
        self._size = size_bytes
        self._target = 0
        self._wake = threading.Event()
        self._closed = False
        self.made_bytes = 0
        self.used_to(0)
        self._thread = threading.Thread(target=self._run, name="arena-pages", daemon=True)
        self._thread.start()

    def used_to(self, end: int) -> None:
        """Offsets up to `end` are, or will soon be, in use. Does not block."""
        if self._target < min(self._size, end + _AHEAD_BYTES // 2):  # not for every load
            self._target = min(self._size, end + _AHEAD_BYTES)
            self._wake.set()

    def close(self) -> None:
        """End the thread. On return nothing is touched any more."""
        self._closed = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            while not self._closed and self.made_bytes < self._target:
                step = min(_STEP_BYTES, self._target - self.made_bytes)
                if _madvise(self._address + self.made_bytes, step, _MADV_POPULATE_WRITE):
                    log.info("pages of the arena are made as they are touched", reason=os.strerror(ctypes.get_errno()))
                    return
                self.made_bytes += step
            if self._closed:
                return
