"""Where the CUDA path's tests run: on a CUDA device where there is one, else on the CPU in Triton's interpreter.

Import this before anything that imports triton. With a device the tests carry the marker `gpu`, so that `make gpu` runs
them there; without one they are part of `make test`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from worker.devices.cuda.queue import Captured, CudaQueue, Queue
from worker.memory.cuda_driver import CudaDriver
from worker.memory.cuda_memory import cuda_memory
from worker.memory.device_memory import DeviceMemory, host_memory

CUDA = torch.cuda.is_available()
if not CUDA:
    if "triton" in sys.modules and "TRITON_INTERPRET" not in os.environ:
        raise RuntimeError("a test module that is collected before this one imports triton; let it import that later")
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="Triton has no build for this machine")

DEVICE = torch.device("cuda" if CUDA else "cpu")
#: Marks a module whose tests run either way.
HERE = [pytest.mark.gpu] if CUDA else []
#: Marks what only a device can show.
ONLY_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device")]


class HostQueue:
    """`worker.devices.cuda.queue.Queue` on the CPU: work is done as it is queued, and a replay does it again."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.captured = 0

    def computing(self) -> AbstractContextManager[object]:
        return nullcontext()

    def capture(self, work: Callable[[], None]) -> Captured:
        self.captured += 1
        return Captured(work, 1000)

    def host(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype)

    def finish(self) -> None:
        pass


def queue() -> Queue:
    """A queue on the device of these tests."""
    return CudaQueue() if CUDA else HostQueue()


def pool(total_bytes: int, granule_bytes: int) -> DeviceMemory:
    """Memory of the device of these tests; granules are as small as it allows."""
    if not CUDA:
        return host_memory(total_bytes, granule_bytes)
    driver = CudaDriver()
    granule_bytes = -(-granule_bytes // driver.granularity_bytes) * driver.granularity_bytes
    return cuda_memory(driver, -(-total_bytes // granule_bytes) * granule_bytes, granule_bytes, DEVICE)
