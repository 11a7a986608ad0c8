"""Tensors over device memory that torch did not allocate, by DLPack.

DLPack names the device, so torch does not ask the driver about the pointer, which may not be mapped yet. A view keeps
nothing alive; see `worker.memory.tensors`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
import torch.utils.dlpack


class _Device(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("index", ctypes.c_int32)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]


#: DLPack's codes of device types, and of element types (signed, unsigned, float, bfloat).
_KINDS = {"cpu": 1, "cuda": 2}
_CODES = {torch.int32: 0, torch.uint8: 1, torch.float32: 2, torch.float16: 2, torch.bfloat16: 4}
#: DLPack descriptions of live tensors made by `shared_tensor`, by address.
_described: dict[int, tuple[_Managed, Any]] = {}
_forget = _Deleter(lambda address: _described.pop(address, None) and None)
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def shared_tensor(address: int, dtype: torch.dtype, shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """A writable, contiguous tensor over the memory of `device` at `address`; reads and copies nothing."""
    sizes = (ctypes.c_int64 * max(len(shape), 1))(*shape)
    where = _Device(_KINDS[device.type], device.index or 0)
    tensor = _Tensor(address, where, len(shape), _CODES[dtype], dtype.itemsize * 8, 1, sizes, None, 0)
    managed = _Managed(tensor, None, _forget)
    at = ctypes.addressof(managed)
    _described[at] = managed, sizes
    made: torch.Tensor = torch.utils.dlpack.from_dlpack(_capsule(at, b"dltensor", None))
    return made
