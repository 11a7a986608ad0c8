"""Tensors and arrays over raw addresses: how typed code sees a span.

A view keeps nothing alive. It must not be touched where its span shows no granule, nor after the span was closed.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def tensor_at(address: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A writable, contiguous tensor over the memory at `address`; nothing is read or copied now."""
    count = math.prod(shape)
    buffer: Any = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype, count=count).view(*shape)


def bytes_at(address: int, count: int) -> np.ndarray:
    """A writable uint8 array `[count]` over the memory at `address`; nothing is read or copied now."""
    buffer: Any = (ctypes.c_char * count).from_address(address)
    return np.frombuffer(buffer, dtype=np.uint8)
