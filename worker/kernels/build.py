"""Builds the CPU kernels with the machine's C++ compiler (runtime/native.py).

    .venv/bin/python -m worker.kernels.build        builds ahead, so that the first start does not wait

The library is built for this machine's processor. Without a compiler the engine computes with torch, which is slower
and gives the same answers within rounding.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from runtime import native
from runtime.native import NotBuilt as NoKernels

__all__ = ["AVX2_ONLY", "OPTIMISE", "NoKernels", "library"]

#: The compiled source; all files in its folder belong to it.
KERNELS = Path(__file__).parent / "cpu" / "layer.cpp"
#: `more` flags that restrict a processor with AVX-512 to AVX2, for tests and measurements.
AVX2_ONLY = ("-mno-avx512f", "-mno-amx-tile")
#: Flags that affect the results' bits.
OPTIMISE = ("-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")
_FLAGS = ("-std=c++17", *OPTIMISE, "-march=native", "-shared", "-fPIC", "-pthread")


def library(source: Path = KERNELS, more: Sequence[str] = ()) -> Path:
    """The library built from `source` with `more` flags, built if necessary. Raises NoKernels."""
    return native.library(source, (*_FLAGS, *more))


if __name__ == "__main__":
    try:
        print(library())
    except NoKernels as e:
        print(f"no compiled kernels; the engine will compute with torch: {e}", file=sys.stderr)
