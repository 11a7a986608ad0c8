"""Maps the arena's pages into this process before loads touch them: a first touch costs half as much as the copy.

The store makes pages from the arena's beginning on (`kvstore/tiers/populate.py`). A thread follows it and maps what is
there; it makes no pages. Before Linux 5.14 pages are mapped when they are touched.
"""

from __future__ import annotations

import ctypes
import mmap
import threading

_MADV_POPULATE_READ = 22  #: <linux/mman.h>; the mmap module does not name it.
_STEP_BYTES = 2 << 20
_LOOK_S = 0.25

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)


class ArenaPages:
    """See the module. mapped_bytes: so far, from the beginning."""

    def __init__(self, address: int, size_bytes: int) -> None:
        """address: of the mapping, which is page-aligned. It may end before `close`: then this ends too."""
        self._address, self._size = address, size_bytes
        self._closed = threading.Event()
        self.mapped_bytes = 0
        threading.Thread(target=self._run, name="upbeat-pages", daemon=True).start()

    def close(self) -> None:
        """Begin no further step."""
        self._closed.set()

    def _run(self) -> None:
        resident = ctypes.create_string_buffer(_STEP_BYTES // mmap.PAGESIZE)
        while self.mapped_bytes < self._size and not self._closed.is_set():
            at, length = self._address + self.mapped_bytes, min(_STEP_BYTES, self._size - self.mapped_bytes)
            if _libc.mincore(at, length, resident):
                return
            if not all(flag & 1 for flag in resident.raw[: -(-length // mmap.PAGESIZE)]):
                self._closed.wait(_LOOK_S)
                continue
            if _libc.madvise(at, length, _MADV_POPULATE_READ):
                return
            self.mapped_bytes += length
