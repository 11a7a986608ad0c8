"""Copies runs of equal pieces between addresses of this process: one native call a run, made without the interpreter's lock.

The function is compiled as the CPU kernels are (`worker.kernels.build`). Where there is no compiler `memmove` is called once a piece.
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
#: copy(to, source, size): `size` bytes from each of `source` to the same place of `to`. Ranges must be valid and must not overlap.
Copy = Callable[[Addresses, Addresses, int], None]


def fastest_copy() -> Copy:
    """What copies on this machine; compiles it when that has not been done."""
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
    """The same without a compiler."""
    for a, b in zip(to.tolist(), source.tolist(), strict=True):
        ctypes.memmove(a, b, size)
