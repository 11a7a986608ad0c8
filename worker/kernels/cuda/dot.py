"""The matrix product of tiles for all kernels: float32 sums, and float32 operands in full precision (no tf32)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def dot(a, b, WIDEN: tl.constexpr):
    """`a [m, k]` times `b [k, n]` in float32."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


def widens(dtype: torch.dtype) -> bool:
    """Whether operands must be widened first: Triton's interpreter multiplies bfloat16 as integers."""
    return bool(triton.knobs.runtime.interpret) and dtype == torch.bfloat16
