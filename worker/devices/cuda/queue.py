"""Where a runner's kernels are queued: the compute stream of a CUDA device, and graphs of what was queued.

The runner knows a `Queue` only; a test's queue on the CPU runs at once what is queued, and "replays" by running it again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class Captured:
    """Recorded work. replay: queues it again, on the same addresses. bytes: device memory that the record takes."""

    replay: Callable[[], None]
    bytes: int = 0


class Queue(Protocol):
    """One stream of work on `device`. Used by one thread."""

    device: torch.device

    def computing(self) -> AbstractContextManager[object]:
        """What is launched inside is queued here."""
        ...

    def capture(self, work: Callable[[], None]) -> Captured:
        """Records what `work` launches, without running it.

        `work` has run plainly before, so that nothing is compiled, loaded or allocated now.
        """
        ...

    def host(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Fresh host memory that the device copies from and to without waiting."""
        ...

    def finish(self) -> None:
        """Return when everything queued has run."""
        ...


class CudaQueue:
    """A stream of its own on CUDA device `index`."""

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)
        self.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def computing(self) -> AbstractContextManager[object]:
        """See `Queue.computing`."""
        stream: AbstractContextManager[object] = torch.cuda.stream(self.stream)
        return stream

    def capture(self, work: Callable[[], None]) -> Captured:
        """See `Queue.capture`. Copies on other streams, begun by other threads, go on meanwhile. bytes: by which the device has less free
        memory after it; what others take in that moment counts too."""
        graph, (before, _) = torch.cuda.CUDAGraph(), torch.cuda.mem_get_info(self.device)
        with self.computing():
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        after, _ = torch.cuda.mem_get_info(self.device)
        return Captured(graph.replay, max(before - after, 0))

    def host(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """See `Queue.host`: page-locked, from torch's cache of such memory."""
        return torch.empty(*shape, dtype=dtype, pin_memory=True)

    def finish(self) -> None:
        """See `Queue.finish`."""
        self.stream.synchronize()
