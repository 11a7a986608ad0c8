"""Shares of a device for serving and for training (HARLI, section 4.3).

On the host a share is a number of processors: the kernels' team uses so many threads, and the trainer is pinned to the
others. Which share is right is decided elsewhere (`worker.core.harvest`).
"""

from __future__ import annotations

import os
from typing import Protocol

import torch

from worker.kernels.cpu_kernels import CpuKernels


class Partition(Protocol):
    """A device that can be shared. shares: in all."""

    shares: int

    def dtype(self, served: torch.dtype) -> str:
        """The type, by torch's name, in which a model of this type trains."""
        ...

    #: Whether serving may have less than all shares.
    divisible: bool

    def use(self, infer: int) -> None:
        """From the next step on, serving has so many shares. On the thread that runs steps."""
        ...

    def others(self, infer: int, harvest: int) -> list[int]:
        """The processors of `harvest` shares that serving with `infer` shares does not use."""
        ...


class HostPartition:
    """Processors. kernels: None: torch computes, whose results depend on the number of threads, so serving keeps
    all."""

    def __init__(self, kernels: CpuKernels | None, threads: int) -> None:
        self._kernels, self.shares = kernels, threads
        self.divisible = kernels is not None and threads > 1
        self._cores = sorted(os.sched_getaffinity(0))
        self._used = threads

    def dtype(self, served: torch.dtype) -> str:
        """See `Partition.dtype`. Without bfloat16 instructions torch's products of it are a hundred times slower."""
        quick = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return "bfloat16" if served is torch.bfloat16 and quick else "float32"

    def use(self, infer: int) -> None:
        """See `Partition.use`."""
        if self._kernels is not None and infer != self._used:
            self._kernels.use(infer)
            self._used = infer

    def others(self, infer: int, harvest: int) -> list[int]:
        """See `Partition.others`. The last ones: serving's threads are not pinned, and the kernel puts them on those
        that are free."""
        return self._cores[-harvest:] if harvest else []
