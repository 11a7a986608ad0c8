"""Measures the compiled kernels on this machine and prints one JSON document, for `upbeat doctor`.

    python -m worker.kernels.examine auto|native|portable

{"speed": kind and speed, "slow": why they are slower than the processor should allow, or ""}, or {"missing": why there
are none}.
"""

from __future__ import annotations

import json
import sys

from runtime import native
from worker.core.kernel_speed import complaint
from worker.kernels.build import NoKernels, library
from worker.kernels.choice import ways_to_multiply
from worker.kernels.cpu_kernels import CpuKernels


def examine(choice: str) -> dict[str, str]:
    """The document for a value of `worker.kernels`; builds the library if necessary."""
    try:
        kernels = CpuKernels(library(), 1, ways_to_multiply(choice))
    except (NoKernels, OSError) as e:
        return {"missing": " ".join(str(e).split())}
    speed = kernels.speed()
    kernels.close()
    return {"speed": str(speed), "slow": complaint(speed, native.abilities())}


if __name__ == "__main__":
    print(json.dumps(examine(sys.argv[1])))
