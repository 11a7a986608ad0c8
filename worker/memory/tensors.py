"""Tensors and arrays over raw addresses, such as a span's.

A view keeps nothing alive. It must not be accessed where its span maps no granule, or after the span is closed.
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
    """A writable, contiguous tensor over the memory of `device` at `address`; reads and copies nothing."""
    if device.type != "cpu":
        return shared_tensor(address, dtype, shape, device)
    count = math.prod(shape)
    buffer: Any = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype, count=count).view(*shape)


class MappedFiles:
    """Finds memory that is a private mapping of given files, whose pages may be dropped and read again."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Reads the current mappings (/proc/self/maps); none when it cannot be read."""
        names = {str(file.resolve()) for file in files}
        try:
            lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
        except OSError:
            lines = []
        ours = [
            words[0].split("-") for words in lines if len(words) == 6 and words[5] in names and words[1].endswith("p")
        ]
        self._ranges = [(int(begin, 16), int(end, 16)) for begin, end in ours]

    def forget(self, tensor: torch.Tensor) -> bool:
        """Drops the pages of a file's tensor from memory; reading brings them back. False, with no effect, for other
        memory.

        Writes to the tensor would be lost. Pages shared with neighbouring data stay.
        """
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.itemsize
        if not any(low <= begin and end <= high for low, high in self._ranges):
            return False
        begin, end = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end:
            _libc.madvise(begin, end - begin, mmap.MADV_DONTNEED)
        return True


def bytes_at(address: int, count: int) -> np.ndarray:
    """A writable uint8 array `[count]` over host memory at `address`; reads and copies nothing."""
    buffer: Any = (ctypes.c_char * count).from_address(address)
    return np.frombuffer(buffer, dtype=np.uint8)
