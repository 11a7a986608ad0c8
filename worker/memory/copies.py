"""Copies runs of equally sized pieces between addresses of this process, one native call per run, without the
interpreter lock.

The function is compiled like the CPU kernels (`worker.kernels.build`). Without a compiler, `memmove` copies each piece.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from runtime import telemetry
from worker.kernels.build import NoKernels, library

log = telemetry.logger("worker.copies")
SOURCE = Path(__file__).parent / "host" / "copies.cpp"

Addresses = npt.NDArray[np.int64]
#: copy(to, source, size): copies `size` bytes from `source[i]` to `to[i]`. Ranges must be valid and must not overlap.
Copy = Callable[[Addresses, Addresses, int], None]


def fastest_copy() -> Copy:
    """The fastest copy function of this machine, compiled if necessary."""
    try:
        return native_copy(library(SOURCE))
    except (NoKernels, OSError) as e:
        log.warning("pieces are copied one by one", reason=str(e))
        return copy_one_by_one


def native_copy(built: Path) -> Copy:
    """The compiled function. Raises OSError when the library cannot be loaded."""
    function = ctypes.CDLL(str(built)).upbeat_copy
    function.argtypes = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    function.restype = None

    def copy(to: Addresses, source: Addresses, size: int) -> None:
        to, source = np.ascontiguousarray(to, np.int64), np.ascontiguousarray(source, np.int64)
        if len(to) != len(source):
            raise ValueError(f"{len(source)} pieces do not go to {len(to)} places")
        function(len(to), to.ctypes.data, source.ctypes.data, size)

    return copy


def copy_one_by_one(to: Addresses, source: Addresses, size: int) -> None:
    """A copy function that needs no compiler."""
    for a, b in zip(to.tolist(), source.tolist(), strict=True):
        ctypes.memmove(a, b, size)
