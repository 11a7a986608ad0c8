"""The compute stream of a CUDA device, and graphs captured from it.

The runner uses the interface `Queue`. Tests on the CPU implement it by running work at once, and replay by running it
again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from worker.memory.cuda_driver import CAPTURING


@dataclass(frozen=True, slots=True)
class Captured:
    """A captured graph. replay: queues its work again, on the same addresses. bytes: its device memory."""

    replay: Callable[[], None]
    bytes: int = 0


class Queue(Protocol):
    """One stream of work on `device`. Used by one thread."""

    device: torch.device

    def computing(self) -> AbstractContextManager[object]:
        """A context in which launched work goes to this queue."""
        ...

    def capture(self, work: Callable[[], None]) -> Captured:
        """Records the launches of `work` without running them.

        `work` must have run before, so that nothing is compiled, loaded or allocated now.
        """
        ...

    def host(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocates host memory for asynchronous copies to and from the device."""
        ...

    def finish(self) -> None:
        """Returns when all queued work has run."""
        ...


class CudaQueue:
    """A new stream on CUDA device `index`."""

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)
        self.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        #: The memory of this queue's graphs. torch refuses a pool whose graphs have all gone.
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def computing(self) -> AbstractContextManager[object]:
        """See `Queue.computing`."""
        stream: AbstractContextManager[object] = torch.cuda.stream(self.stream)
        return stream

    def capture(self, work: Callable[[], None]) -> Captured:
        """See `Queue.capture`. Other threads may start copies on other streams meanwhile, and wait before they map
        memory. bytes: the decrease of the device's free memory, including concurrent allocations of others."""
        graph, (before, _) = torch.cuda.CUDAGraph(), torch.cuda.mem_get_info(self.device)
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()
        with CAPTURING, self.computing():
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        self._graphs.add(graph)
        after, _ = torch.cuda.mem_get_info(self.device)
        return Captured(graph.replay, max(before - after, 0))

    def host(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """See `Queue.host`. Page-locked, from torch's cache."""
        return torch.empty(*shape, dtype=dtype, pin_memory=True)

    def finish(self) -> None:
        """See `Queue.finish`."""
        self.stream.synchronize()
