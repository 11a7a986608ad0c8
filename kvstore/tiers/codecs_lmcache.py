"""FP8 and K16V8 by LMCache's KV quantisation (`lmcache.v1.kv_codec`): float8 e4m3 with a scale per head for K and for
V.

LMCache chooses scales and converts. The byte layout is ours, because the object's header already has every length,
shape and checksum, and LMCache's serialisation stores one scale per tensor. Scales are rounded up to powers of two:
exact in a floating-point format, so encoding a decoded piece changes nothing, and a scale takes one byte.

Importing this module imports torch; it raises Unavailable where LMCache or torch is missing.
"""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from contracts.errors import PieceLost
from contracts.kv import KvShape
from kvstore.tiers.codec import INSTALL, Unavailable, Unencodable


def load_lmcache(module: str, needs: str) -> Any:
    """Import one of LMCache's modules. Raises Unavailable, saying what to install."""
    # LMCache logs to stdout on import, and reports usage to its vendor when its engine starts.
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
    try:
        return import_module(module)
    except Exception as e:  # its many imports fail in different ways
        raise Unavailable(f"{module} cannot be imported ({type(e).__name__}: {e}); {needs}") from e


# Checked before importing torch, which takes seconds.
for package in ("lmcache", "torch"):
    if find_spec(package) is None:
        raise Unavailable(f"the package {package} is not installed; install torch, and LMCache by `{INSTALL}`")
import torch  # noqa: E402

_kv_codec = load_lmcache("lmcache.v1.kv_codec", f"install it by `{INSTALL}`")

# Several threads encode and decode at a time, and the worker needs the cores too.
torch.set_num_threads(1)

#: The bit pattern of NaN in e4m3, without the sign.
_NAN = 0x7F
_SCALES = torch.int8
#: Exponents of scales that float32 represents exactly.
_LEAST, _MOST = -126, 127


def tensor_of(piece: memoryview, shape: KvShape) -> torch.Tensor:
    """The piece as `[kv_heads, 2, chunk_tokens, head_dim]`, sharing its memory."""
    flat = torch.frombuffer(piece, dtype=getattr(torch, shape.dtype))
    return flat.view(shape.kv_heads, 2, shape.chunk_tokens, shape.head_dim)


def _quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(float8 values, exponents of the scales) of `[scales, values]`. Raises Unencodable."""
    per_row: dict[str, Any] = {"scope": _kv_codec.ScaleScope.PER_LAYER_HEAD, "head_axis": 0}
    smallest = _kv_codec.compute_v_scales(rows, **per_row)
    if not bool(torch.isfinite(smallest).all()):
        raise Unencodable("infinite values")
    mantissa, exponent = torch.frexp(smallest)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(_LEAST, _MOST)
    scales = torch.ldexp(torch.ones_like(smallest), exponent)
    values = _kv_codec.quantize_v_fp8(rows, scales, **per_row)
    if bool(((values.view(torch.uint8) & _NAN) == _NAN).any()):
        raise Unencodable("values that are not numbers")
    return values, exponent.to(_SCALES)


def _dequantize(values: torch.Tensor, exponents: torch.Tensor, into: torch.Tensor) -> None:
    """The inverse, written to `into`, `[scales, values]`."""
    if int(exponents.min()) < _LEAST:
        raise PieceLost("impossible scale")
    scales = torch.ldexp(torch.ones(len(exponents)), exponents.to(torch.int32))
    exact = _kv_codec.dequantize_v_fp8(
        values, scales, scope=_kv_codec.ScaleScope.PER_LAYER_HEAD, out_dtype=torch.float32, head_axis=0
    )
    # Rounding up to the next float8 may exceed the range of the model's type.
    most = torch.finfo(into.dtype).max
    into.copy_(exact.clamp_(-most, most))


def _packed(*parts: torch.Tensor) -> memoryview:
    joined = torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])
    data: Any = joined.numpy()
    return memoryview(data)


def _split(stored: memoryview, *lengths: int) -> list[torch.Tensor]:
    if len(stored) != sum(lengths):
        raise PieceLost("the stored length is not the codec's")
    # torch requires writable memory.
    whole = torch.frombuffer(bytearray(stored) if stored.readonly else stored, dtype=torch.uint8)
    return list(torch.split_with_sizes(whole, lengths))


class Fp8:
    """K and V as float8: `[kv_heads * 2 * chunk_tokens * head_dim]` values, then `[kv_heads * 2]` exponents."""

    name = "fp8"

    def encode(self, piece: memoryview, shape: KvShape, layer: int) -> memoryview:
        return _packed(*_quantize(tensor_of(piece, shape).view(shape.kv_heads * 2, -1)))

    def decode(self, stored: memoryview, into: memoryview, shape: KvShape, layer: int) -> None:
        rows = shape.kv_heads * 2
        values, exponents = _split(stored, rows * shape.chunk_tokens * shape.head_dim, rows)
        target = tensor_of(into, shape).view(rows, -1)
        _dequantize(values.view(torch.float8_e4m3fn).view_as(target), exponents.view(_SCALES), target)


class K16V8:
    """K with 16 bits, unchanged where the model has 16 (float32 becomes float16), and V as float8.

    `[kv_heads, chunk_tokens, head_dim]` of K, as many values of V, then `[kv_heads]` exponents.
    """

    name = "k16v8"

    def encode(self, piece: memoryview, shape: KvShape, layer: int) -> memoryview:
        whole = tensor_of(piece, shape)
        k = whole[:, 0]
        if k.element_size() > 2:
            k = k.to(torch.float16)
            if not bool(torch.isfinite(k).all()):
                raise Unencodable("K beyond float16")
        return _packed(k, *_quantize(whole[:, 1].reshape(shape.kv_heads, -1)))

    def decode(self, stored: memoryview, into: memoryview, shape: KvShape, layer: int) -> None:
        target = tensor_of(into, shape)
        values = shape.kv_heads * shape.chunk_tokens * shape.head_dim
        k, v, exponents = _split(stored, values * 2, values, shape.kv_heads)
        k_type = target.dtype if target.element_size() == 2 else torch.float16
        target[:, 0].copy_(k.view(k_type).view(target[:, 0].shape))
        decoded = torch.empty(shape.kv_heads, values // shape.kv_heads, dtype=target.dtype)
        _dequantize(v.view(torch.float8_e4m3fn).view_as(decoded), exponents.view(_SCALES), decoded)
        target[:, 1].copy_(decoded.view(target[:, 1].shape))
