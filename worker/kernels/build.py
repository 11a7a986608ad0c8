"""Builds the CPU kernels with the machine's C++ compiler (runtime/native.py).

    .venv/bin/python -m worker.kernels.build        builds ahead, so that the first start does not wait

The library is made for the very processor it is built on. Where there is no compiler the engine computes with torch, which is
slower and gives the same answers within rounding.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from runtime import native
from runtime.native import NotBuilt as NoKernels

__all__ = ["AVX2_ONLY", "OPTIMISE", "NoKernels", "library"]

#: What is compiled; everything beside it in its folder belongs to it.
KERNELS = Path(__file__).parent / "cpu" / "layer.cpp"
#: `more` flags with which a processor that has AVX-512 computes like one that has AVX2 only: for tests and measurements.
AVX2_ONLY = ("-mno-avx512f", "-mno-amx-tile")
#: What the results' bits depend on, beside the sources.
OPTIMISE = ("-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")
_FLAGS = ("-std=c++17", *OPTIMISE, "-march=native", "-shared", "-fPIC", "-pthread")


def library(source: Path = KERNELS, more: Sequence[str] = ()) -> Path:
    """The library built from `source`, with `more` flags; builds it when it is not there. Raises NoKernels."""
    return native.library(source, (*_FLAGS, *more))


if __name__ == "__main__":
    try:
        print(library())
    except NoKernels as e:
        print(f"no compiled kernels; the engine will compute with torch: {e}", file=sys.stderr)
