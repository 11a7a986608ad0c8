"""What a device's memory can do: physical granules, and address ranges that show them.

The semantics are those of CUDA's virtual memory management (reserve a range, create physical memory, map, unmap) on every device: a memfd
on the host (`host_memory`), the driver on CUDA (`cuda_memory`). Prior art: kvcached and vAttention do this over CUDA VMM; a plain allocator
could not lend a weight's memory to the KV cache without copying everything around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from worker.memory.exports import Exported


class PhysicalMemory(Protocol):
    """Granules, by number, and address ranges that show them. Callers keep every granule in one place at most."""

    #: Where tensors over the ranges live.
    device: torch.device

    def reserve(self, bytes_: int) -> int:
        """The address of a fresh range of whole granules that shows nothing."""
        ...

    def release(self, address: int, bytes_: int) -> None:
        """Gives a range back; what it shows is hidden first."""
        ...

    def show(self, address: int, granules: Sequence[int]) -> None:
        """Shows `granules` side by side from `address` on. One without memory gets some, all zero, now."""
        ...

    def hide(self, address: int, count: int) -> None:
        """Shows nothing any more in `count` granules from `address` on. Their content stays. Nothing may use the range now."""
        ...

    def drop(self, granules: Sequence[int]) -> None:
        """Returns the memory of hidden granules to the system; content is lost."""
        ...

    def export(self, granules: Sequence[int]) -> Exported:
        """Handles by which another process shows these granules too. One without memory gets some, all zero, now."""
        ...

    def resident_bytes(self) -> int:
        """Physical memory that granules have now."""
        ...

    def close(self) -> None:
        """Ends all of it; every range was released before."""
        ...
