"""xxh3-64 of many memory ranges at a time, without the GIL where possible.

python-xxhash holds the GIL while it computes. Here its library is called directly, in a small loop that is compiled
once for the machine (runtime/native.py). Until that is available, and where there is no compiler, python-xxhash
computes; the digests are the same.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
import xxhash._xxhash as python_xxhash

from runtime import native, telemetry
from runtime.native import NotBuilt

_SOURCE = Path(__file__).parent / "native" / "sums.cpp"
_FLAGS = ("-std=c++17", "-O2", "-shared", "-fPIC")
#: Smaller ranges are done before the GIL could be taken again.
_WORTH_BYTES = 32 << 10
#: Lengths that xxh3 treats differently.
_TRIED = (0, 1, 7, 16, 100, 200, 300, 1024, 4096, 65_537)

log = telemetry.logger("kvstore.checksums")


class _Loop:
    """The compiled loop over the hash function exported by python-xxhash's library. Raises NotBuilt, OSError,
    AttributeError."""

    def __init__(self) -> None:
        library: Any = ctypes.CDLL(str(native.library(_SOURCE, _FLAGS)))
        hashes: Any = ctypes.CDLL(python_xxhash.__file__)
        # The variant that detects the processor, if the build has it.
        best = hashes.XXH3_64bits_dispatch if hasattr(hashes, "XXH3_64bits_dispatch") else hashes.XXH3_64bits
        self._hash = ctypes.cast(best, ctypes.c_void_p)
        self._call = library.upbeat_sums
        self._call.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        self._call.restype = None
        self._check()

    def _check(self) -> None:
        data = os.urandom(max(_TRIED) + 1)
        held = np.frombuffer(data, dtype=np.uint8)
        if self.sums(held.ctypes.data, _array([(1, n) for n in _TRIED])) != [
            xxhash.xxh3_64_intdigest(data[1 : 1 + n]) for n in _TRIED
        ]:
            raise NotBuilt("its digests are not those of python-xxhash")

    def sums(self, base: int, ranges: npt.NDArray[np.int64]) -> list[int]:
        """xxh3-64 of each (offset from `base`, length)."""
        sums = np.empty(len(ranges), dtype=np.uint64)
        self._call(self._hash, base, ranges.ctypes.data, len(ranges), sums.ctypes.data)
        found: list[int] = sums.tolist()
        return found


_loop: _Loop | None = None
_started = threading.Lock()
_ended = threading.Event()


def prepare(*, wait_s: float = 0.0) -> bool:
    """Build the loop in the background, once per process. Returns whether it is ready, after waiting for up to the
    given time."""
    if _started.acquire(blocking=False):  # never released
        threading.Thread(target=_prepare, name="checksums", daemon=True).start()
    _ended.wait(wait_s)
    return _loop is not None


def _prepare() -> None:
    global _loop
    try:
        _loop = _Loop()
    except (NotBuilt, OSError, AttributeError) as e:
        log.info("checksums are computed one by one", reason=str(e))
    finally:
        _ended.set()


def sums(view: memoryview, address: int, ranges: Sequence[tuple[int, int]]) -> list[int]:
    """xxh3-64 of each (offset, length) of the memory `view` at `address`. Raises ValueError when one is outside it."""
    wanted = _array(ranges)
    offsets, lengths = wanted[:, 0], wanted[:, 1]
    if wanted.min(initial=0) < 0 or (lengths > len(view) - offsets).any():
        raise ValueError("a range lies outside of the memory")
    loop = _loop
    if loop is not None and lengths.sum() >= _WORTH_BYTES:
        return loop.sums(address, wanted)
    return [xxhash.xxh3_64_intdigest(view[offset : offset + length]) for offset, length in ranges]


def _array(ranges: Sequence[tuple[int, int]]) -> npt.NDArray[np.int64]:
    return np.fromiter(chain.from_iterable(ranges), np.int64, 2 * len(ranges)).reshape(-1, 2)
