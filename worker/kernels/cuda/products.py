"""Batch-invariant matrix products (`worker.batch_invariant`).

A library chooses its algorithm, and so the order of sums, by the number of rows. This kernel always uses one tile
shape: every output is one float32 sum over its inputs in ascending order. It is slower than the library, most of all
with many rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worker.kernels.cuda.dot import dot, widens
from worker.kernels.cuda.quantised import quantised_product
from worker.models.quantised import Matrix, QuantisedMatrix

_ROWS, _OUTPUTS, _INPUTS = 64, 64, 64


@triton.jit(do_not_specialize=["rows"])
def _product(
    x,
    weight,
    bias,
    out,
    rows,
    outputs,
    inputs,
    x_stride,
    out_stride,
    BIAS: tl.constexpr,
    WIDEN: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    o = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    i = tl.arange(0, INPUTS)
    x_at = x + r.to(tl.int64)[:, None] * x_stride + i[None, :]
    w_at = weight + o.to(tl.int64)[:, None] * inputs + i[None, :]
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for first in range(0, inputs, INPUTS):
        there = (first + i < inputs)[None, :]
        a = tl.load(x_at + first, mask=(r < rows)[:, None] & there, other=0.0)
        b = tl.load(w_at + first, mask=(o < outputs)[:, None] & there, other=0.0)
        total += dot(a, tl.trans(b), WIDEN)
    if BIAS:
        total += tl.load(bias + o, mask=o < outputs, other=0.0).to(tl.float32)[None, :]
    inside = (r < rows)[:, None] & (o < outputs)[None, :]
    tl.store(out + r.to(tl.int64)[:, None] * out_stride + o[None, :], total.to(out.dtype.element_ty), mask=inside)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """`out [rows, outputs]` = `x [rows, inputs]` times `weight [outputs, inputs]` transposed, plus `bias [outputs]`."""
    rows, outputs = out.shape
    grid = (triton.cdiv(outputs, _OUTPUTS), triton.cdiv(rows, _ROWS))
    _product[grid](
        x,
        weight,
        weight if bias is None else bias,
        out,
        rows,
        outputs,
        weight.shape[1],
        x.stride(0),
        out.stride(0),
        BIAS=bias is not None,
        WIDEN=widens(x.dtype),
        ROWS=_ROWS,
        OUTPUTS=_OUTPUTS,
        INPUTS=_INPUTS,
        num_warps=4,
        num_stages=3 if x.dtype.itemsize == 2 else 2,
    )


def multiply(x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None, out: torch.Tensor, same_bits: bool) -> None:
    """`product` by the kernel for `weight`, or by the library. same_bits: a row's bits depend on the row only."""
    if isinstance(weight, QuantisedMatrix):
        quantised_product(x, weight, bias, out, same_bits)
    elif same_bits:
        product(x, weight, bias, out)
    elif bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)
