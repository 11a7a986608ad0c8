"""Tensors and arrays over raw addresses: how typed code sees a span.

A view keeps nothing alive. It must not be touched where its span shows no granule, nor after the span was closed.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from worker.memory.cuda_tensors import shared_tensor

_HOST = torch.device("cpu")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def tensor_at(address: int, dtype: torch.dtype, shape: Sequence[int], device: torch.device = _HOST) -> torch.Tensor:
    """A writable, contiguous tensor over the memory of `device` at `address`; nothing is read or copied now."""
    if device.type != "cpu":
        return shared_tensor(address, dtype, shape, device)
    count = math.prod(shape)
    buffer: Any = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype, count=count).view(*shape)


class MappedFiles:
    """Which of this process's memory is a private mapping of some files: what may be given up and read again."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Looks at the mappings as they are now; where the system does not tell, none counts."""
        names = {str(file.resolve()) for file in files}
        try:
            lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
        except OSError:
            lines = []
        ours = [words[0].split("-") for words in lines if len(words) == 6 and words[5] in names and words[1].endswith("p")]
        self._ranges = [(int(begin, 16), int(end, 16)) for begin, end in ours]

    def forget(self, tensor: torch.Tensor) -> bool:
        """Take a file's tensor out of this process's memory; reading brings it back. False, with nothing done, for other memory.

        The tensor must not have been written to: that would be lost. Pages that it shares with a neighbour stay.
        """
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.itemsize
        if not any(low <= begin and end <= high for low, high in self._ranges):
            return False
        begin, end = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end:
            _libc.madvise(begin, end - begin, mmap.MADV_DONTNEED)
        return True


def bytes_at(address: int, count: int) -> np.ndarray:
    """A writable uint8 array `[count]` over the host memory at `address`; nothing is read or copied now."""
    buffer: Any = (ctypes.c_char * count).from_address(address)
    return np.frombuffer(buffer, dtype=np.uint8)
