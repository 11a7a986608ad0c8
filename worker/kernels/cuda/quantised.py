"""Matrix products with weights of few bits (`worker.models.quantised`), which become numbers in registers.

A tile of weights is computed in float32, rounded to the type of the activations, and multiplied as in
`worker.kernels.cuda.products`: an output is one float32 sum over its inputs in ascending order. With one shape of tiles
for all steps a row's bits do not depend on the other rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worker.kernels.cuda.dot import dot, widens
from worker.models.quantised import QuantisedMatrix

#: Rows of a tile, of steps with few and with many rows.
_FEW, _MANY = 16, 64
_OUTPUTS, _INPUTS = 64, 64
_CODES = {"int4": 0, "int8": 1, "fp8": 2}


@triton.jit(do_not_specialize=["rows"])
def _product(
    x,
    codes,
    scales,
    zeros,
    group_of,
    bias,
    out,
    rows,
    outputs,
    inputs,
    groups,
    group,
    x_stride,
    out_stride,
    CODE: tl.constexpr,
    SCATTERED: tl.constexpr,
    ALIGNED: tl.constexpr,  # the inputs of a tile are in one group
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
    of_outputs = o.to(tl.int64)[:, None]
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for first in range(0, inputs, INPUTS):
        at = first + i
        there = (o < outputs)[:, None] & (at < inputs)[None, :]
        if CODE == 0:
            pair = first // 2 + tl.arange(0, INPUTS // 2)
            here = (o < outputs)[:, None] & (pair < inputs // 2)[None, :]
            both = tl.load(codes + of_outputs * (inputs // 2) + pair[None, :], mask=here, other=0).to(tl.int32)
            code = tl.interleave(both & 15, both >> 4)
        else:
            code = tl.load(codes + of_outputs * inputs + at[None, :], mask=there, other=0).to(tl.int32)
        if ALIGNED:
            of_group = of_outputs * groups + first // group
            known = (o < outputs)[:, None]
        else:
            if SCATTERED:
                of_group = of_outputs * groups + tl.load(group_of + at, mask=at < inputs, other=0)[None, :]
            else:
                of_group = of_outputs * groups + (at // group)[None, :]
            known = there
        scale = tl.load(scales + of_group, mask=known, other=0.0).to(tl.float32)
        if CODE == 2:  # the bits of a float8 in a float16 are the number divided by 2^8
            half = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
            w = half.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * (scale * 256.0)
        else:
            zero = tl.load(zeros + of_group, mask=known, other=0).to(tl.int32)
            w = (code - zero).to(tl.float32) * scale
        a = tl.load(x_at + first, mask=(r < rows)[:, None] & (at < inputs)[None, :], other=0.0)
        total += dot(a, tl.trans(w.to(x.dtype.element_ty)), WIDEN)
    if BIAS:
        total += tl.load(bias + o, mask=o < outputs, other=0.0).to(tl.float32)[None, :]
    inside = (r < rows)[:, None] & (o < outputs)[None, :]
    tl.store(out + r.to(tl.int64)[:, None] * out_stride + o[None, :], total.to(out.dtype.element_ty), mask=inside)


def quantised_product(
    x: torch.Tensor, weight: QuantisedMatrix, bias: torch.Tensor | None, out: torch.Tensor, batch_invariant: bool
) -> None:
    """`out [rows, outputs]` = `x [rows, inputs]` times `weight` transposed, plus `bias [outputs]`. batch_invariant:
    always with the same tiles."""
    rows, outputs = out.shape
    tile = _MANY if batch_invariant or rows > _FEW else _FEW
    grid = (triton.cdiv(outputs, _OUTPUTS), triton.cdiv(rows, tile))
    scattered = weight.group_of is not None
    _product[grid](
        x,
        weight.codes,
        weight.scales,
        weight.codes if weight.zeros is None else weight.zeros,
        weight.codes if weight.group_of is None else weight.group_of,
        out if bias is None else bias,
        out,
        rows,
        outputs,
        weight.inputs,
        weight.scales.shape[1],
        weight.group,
        x.stride(0),
        out.stride(0),
        CODE=_CODES[weight.code],
        SCATTERED=scattered,
        ALIGNED=not scattered and (weight.group % _INPUTS == 0 or weight.group >= weight.inputs),
        BIAS=bias is not None,
        WIDEN=widens(x.dtype),
        ROWS=tile,
        OUTPUTS=_OUTPUTS,
        INPUTS=_INPUTS,
        num_warps=4,
        num_stages=3 if x.dtype.itemsize == 2 else 2,
    )
