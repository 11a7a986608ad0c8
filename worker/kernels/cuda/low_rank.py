"""Low-rank products of LoRA adapters beside a product of a whole batch. Every row is computed by itself, so its result
depends on nothing but its input and its adapter.

Matrices are those of `worker.models.adapters`. numbers: int32, each row's adapter; -1: none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_LOWS, _INPUTS, _OUTPUTS = 16, 256, 64


@triton.jit
def _lower(
    x,  # [rows, inputs]
    a,  # [adapters, MANY, inputs]
    numbers,
    low,  # float32 [rows, MANY]
    inputs,
    MANY: tl.constexpr,
    LOWS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    number = tl.load(numbers + row)
    if number >= 0:
        j, i = tl.program_id(1) * LOWS + tl.arange(0, LOWS), tl.arange(0, INPUTS)
        at = a + (number.to(tl.int64) * MANY + j)[:, None] * inputs + i[None, :]
        total = tl.zeros([LOWS], tl.float32)
        for first in range(0, inputs, INPUTS):
            there = first + i < inputs
            mine = tl.load(x + row * inputs + first + i, mask=there, other=0.0).to(tl.float32)
            matrix = tl.load(at + first, mask=(j < MANY)[:, None] & there[None, :], other=0.0).to(tl.float32)
            total += tl.sum(matrix * mine[None, :], 1)
        tl.store(low + row * MANY + j, total, mask=j < MANY)


@triton.jit
def _raise(
    low,  # float32 [rows, SEGMENTS * RANK]
    b,  # [adapters, outputs, RANK]
    numbers,
    out,  # [rows, outputs]
    outputs,
    second,  # where the second segment begins, and the third
    third,
    SEGMENTS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_UP: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    number = tl.load(numbers + row)
    if number >= 0:
        o, r = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, RANK_UP)
        inside = (o < outputs)[:, None] & (r < RANK)[None, :]
        segment = (o >= second).to(tl.int32) + (o >= third).to(tl.int32)
        mine = tl.load(low + row * SEGMENTS * RANK + segment[:, None] * RANK + r[None, :], mask=inside, other=0.0)
        at = (number.to(tl.int64) * outputs + o)[:, None] * RANK + r[None, :]
        delta = tl.sum(mine * tl.load(b + at, mask=inside, other=0.0).to(tl.float32), 1)
        to = out + row * outputs + o
        y = tl.load(to, mask=o < outputs, other=0.0)
        tl.store(to, (y.to(tl.float32) + delta).to(y.dtype), mask=o < outputs)


def add_low_rank(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    numbers: torch.Tensor,
    out: torch.Tensor,
    low: torch.Tensor,
    segments: Sequence[int],
) -> None:
    """Adds to `out [rows, outputs]`, the product of `x [rows, inputs]`, each row's low-rank product. segments: outputs
    of its one to three projections. low: float32, room for `rows * segments * rank`; overwritten."""
    (rows, outputs), inputs, many, rank = out.shape, x.shape[1], a.shape[1], b.shape[2]
    _lower[(rows, triton.cdiv(many, _LOWS))](x, a, numbers, low, inputs, many, _LOWS, _INPUTS, num_warps=4)
    second = segments[0]
    third = second + segments[1] if len(segments) > 1 else outputs
    _raise[(rows, triton.cdiv(outputs, _OUTPUTS))](
        low,
        b,
        numbers,
        out,
        outputs,
        second,
        third,
        len(segments),
        rank,
        triton.next_power_of_2(rank),
        _OUTPUTS,
        num_warps=4,
    )
