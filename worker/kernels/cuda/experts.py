"""A layer's choice among experts: routing, rows by expert, and products in which each expert's weights are read for all
of its rows at once.

A pair is one of a row's experts: number `row * per_token + rank`, the most probable first. Shapes of launches depend on
the number of rows only, so that a graph holds them. A pair's result does not depend on the batch, as long as `rows` of
`grouped_product` is the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worker.kernels.cuda.dot import dot, widens

_OUTPUTS, _INPUTS = 64, 64
_SORTED_AT_ONCE = 1024


@triton.jit
def _route(
    logits,  # [rows, EXPERTS]
    places,  # int32 [rows, 2], see rotate_write; unused without PADDED
    chosen,  # int32 [rows, PER_TOKEN]
    weights,  # [rows, PER_TOKEN]
    EXPERTS: tl.constexpr,
    EXPERTS_UP: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    PER_TOKEN_UP: tl.constexpr,
    NORM: tl.constexpr,
    PADDED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    e, rank = tl.arange(0, EXPERTS_UP), tl.arange(0, PER_TOKEN_UP)
    wide = tl.load(logits + row * EXPERTS + e, mask=e < EXPERTS, other=float("-inf")).to(tl.float32)
    share = tl.exp(wide - tl.max(wide, 0))
    share = share / tl.sum(share, 0)
    its = tl.zeros([PER_TOKEN_UP], tl.int32)
    its_share = tl.zeros([PER_TOKEN_UP], tl.float32)
    for n in range(PER_TOKEN):
        best = tl.max(share, 0)
        # A row of NaN, which nobody reads, takes the last expert.
        which = tl.minimum(tl.min(tl.where(share == best, e, EXPERTS_UP), 0), EXPERTS - 1)
        its = tl.where(rank == n, which, its)
        its_share = tl.where(rank == n, best, its_share)
        share = tl.where(e == which, -1.0, share)
    if NORM:
        its_share = its_share / tl.sum(its_share, 0)
    if PADDED:
        its = tl.where(tl.load(places + row * 2) < 0, EXPERTS, its)  # padding takes none
    at, inside = row * PER_TOKEN + rank, rank < PER_TOKEN
    tl.store(chosen + at, its, mask=inside)
    tl.store(weights + at, its_share.to(weights.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _sort(
    chosen,  # int32 [count]
    count,
    pairs,  # int32 [count]
    bounds,  # int32 [experts, 2]
    BLOCK: tl.constexpr,
):
    expert = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    begin = 0
    for first in range(0, count, BLOCK):
        its = tl.load(chosen + first + i, mask=first + i < count, other=expert)
        begin += tl.sum((its < expert).to(tl.int32), 0)
    end = begin
    for first in range(0, count, BLOCK):
        its = tl.load(chosen + first + i, mask=first + i < count, other=-1)
        mine = (its == expert).to(tl.int32)
        tl.store(pairs + end + tl.cumsum(mine, 0) - 1, first + i, mask=mine > 0)
        end += tl.sum(mine, 0)
    tl.store(bounds + expert * 2, begin)
    tl.store(bounds + expert * 2 + 1, end)


@triton.jit
def _grouped_product(
    x,  # [pairs / SHARE, inputs]
    weight,  # [experts, outputs, inputs]
    out,  # [pairs, outputs]
    pairs,
    bounds,
    outputs,
    inputs,
    SHARE: tl.constexpr,  # pairs that share a row of x
    WIDEN: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    expert = tl.program_id(1)
    begin, end = tl.load(bounds + expert * 2), tl.load(bounds + expert * 2 + 1)
    r, i = tl.arange(0, ROWS), tl.arange(0, INPUTS)
    o = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    w_at = weight + (expert.to(tl.int64) * outputs + o)[:, None] * inputs + i[None, :]
    for start in range(begin, end, ROWS):
        pair = tl.load(pairs + start + r, mask=start + r < end, other=0).to(tl.int64)
        x_at = x + (pair // SHARE)[:, None] * inputs + i[None, :]
        total = tl.zeros([ROWS, OUTPUTS], tl.float32)
        for first in range(0, inputs, INPUTS):
            there = (first + i < inputs)[None, :]
            a = tl.load(x_at + first, mask=(start + r < end)[:, None] & there, other=0.0)
            b = tl.load(w_at + first, mask=(o < outputs)[:, None] & there, other=0.0)
            total += dot(a, tl.trans(b), WIDEN)
        inside = (start + r < end)[:, None] & (o < outputs)[None, :]
        tl.store(out + pair[:, None] * outputs + o[None, :], total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _mix(outputs, weights, out, HIDDEN: tl.constexpr, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for n in range(PER_TOKEN):
        pair = row * PER_TOKEN + n
        one = tl.load(outputs + pair * HIDDEN + i, mask=i < HIDDEN, other=0.0)
        weight = tl.load(weights + pair)
        total += (one.to(tl.float32) * weight.to(tl.float32)).to(one.dtype).to(tl.float32)
    tl.store(out + row * HIDDEN + i, total.to(out.dtype.element_ty), mask=i < HIDDEN)


def route(
    logits: torch.Tensor, places: torch.Tensor | None, norm: bool, chosen: torch.Tensor, weights: torch.Tensor
) -> None:
    """Chooses experts of each row by `logits [rows, experts]`: `chosen` int32 and `weights`, both `[rows, per_token]`.

    places: as for `rotate_write`; rows of padding choose no expert, which is told by the number of experts.
    """
    (rows, experts), per_token = logits.shape, chosen.shape[1]
    _route[(rows,)](
        logits,
        chosen if places is None else places,
        chosen,
        weights,
        experts,
        triton.next_power_of_2(experts),
        per_token,
        triton.next_power_of_2(per_token),
        norm,
        places is not None,
        num_warps=1,
    )


def sort_by_expert(chosen: torch.Tensor, pairs: torch.Tensor, bounds: torch.Tensor) -> None:
    """`pairs` int32 `[rows * per_token]`: pairs by expert, in ascending order. bounds int32 `[experts, 2]`: where those
    of each expert begin and end."""
    _sort[(bounds.shape[0],)](chosen, chosen.numel(), pairs, bounds, _SORTED_AT_ONCE, num_warps=4)


def grouped_product(
    x: torch.Tensor, weight: torch.Tensor, pairs: torch.Tensor, bounds: torch.Tensor, rows: int, out: torch.Tensor
) -> None:
    """Row `pair` of `out [pairs, outputs]` = the pair's row of x times its expert's matrix of `weight [experts *
    outputs, inputs]`, transposed. x `[pairs, inputs]`, or with one row for all pairs of a token. rows: of a tile."""
    count, outputs = out.shape
    _grouped_product[(triton.cdiv(outputs, _OUTPUTS), bounds.shape[0])](
        x,
        weight,
        out,
        pairs,
        bounds,
        outputs,
        weight.shape[1],
        SHARE=count // x.shape[0],
        WIDEN=widens(x.dtype),
        ROWS=rows,
        OUTPUTS=_OUTPUTS,
        INPUTS=_INPUTS,
        num_warps=4,
        num_stages=3 if x.dtype.itemsize == 2 else 2,
    )


def mix(outputs: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
    """`out [rows, hidden]` = sums over a row's pairs of `outputs [rows * per_token, hidden]` times `weights [rows,
    per_token]`."""
    (rows, hidden), block = out.shape, 1024
    _mix[(rows, triton.cdiv(hidden, block))](outputs, weights, out, hidden, weights.shape[1], block, num_warps=4)
