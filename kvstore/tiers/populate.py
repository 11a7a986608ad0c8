"""Pages of the arena are made before something is read into them: what a page costs is then not on the way of a load.

A new page is cleared by the kernel, some 0.5 s a GiB, and one at a time as bytes arrive it is dearer than that. A thread stays a little
ahead of what the ledger has ever given out; so a store that holds little takes little memory. Where the kernel cannot do it (before
Linux 5.14) pages are made as they are touched.
"""

from __future__ import annotations

import ctypes
import os
import threading

from runtime import telemetry

log = telemetry.logger("kvstore.populate")

_MADV_POPULATE_WRITE = 23  #: <linux/mman.h>; the mmap module does not name it.
#: What a burst of loads takes while the thread makes more: it is faster than any tier.
_AHEAD_BYTES = 256 << 20
#: So that closing never waits long.
_STEP_BYTES = 4 << 20

_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Populating:
    """Keeps pages made from the beginning of `size_bytes` of writable memory at `address`, which begins a page, to some way past what is
    used. `made_bytes`: how far it has come."""

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
        """Something lies, or soon will, at offsets up to `end`. Does not block."""
        if self._target < min(self._size, end + _AHEAD_BYTES // 2):  # not during every load
            self._target = min(self._size, end + _AHEAD_BYTES)
            self._wake.set()

    def close(self) -> None:
        """End the thread: nothing is touched any more when this returns."""
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
