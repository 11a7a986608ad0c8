"""A layer's operations on single rows: norms, rotation with the write into pages, and the gate.

Sums and products are float32; results are rounded where the published implementations round (`worker.models.llama`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _add_norm(
    x,
    delta,
    weight,
    out,
    eps,
    HIDDEN: tl.constexpr,
    HIDDEN_UP: tl.constexpr,
    ADD: tl.constexpr,
    GEMMA: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, HIDDEN_UP)
    inside = i < HIDDEN
    mine = tl.load(x + row * HIDDEN + i, mask=inside, other=0.0)
    if ADD:
        mine = (mine.to(tl.float32) + tl.load(delta + row * HIDDEN + i, mask=inside, other=0.0).to(tl.float32)).to(
            mine.dtype
        )
        tl.store(x + row * HIDDEN + i, mine, mask=inside)
    wide = mine.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / HIDDEN + eps)
    gain = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    result = normed * (1.0 + gain) if GEMMA else gain * normed.to(mine.dtype).to(tl.float32)
    tl.store(out + row * HIDDEN + i, result.to(mine.dtype), mask=inside)


@triton.jit
def _normed(low, high, weight, d, eps, HALF: tl.constexpr, DTYPE: tl.constexpr, GEMMA: tl.constexpr):
    """Root-mean-square norm of heads, given as two halves `[n, HALF]`, rounded to the model's type."""
    scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF) + eps)[:, None]
    gain_low = tl.load(weight + d, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    gain_high = tl.load(weight + HALF + d, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    low, high = low * scale, high * scale
    if GEMMA:
        low, high = low * (1.0 + gain_low), high * (1.0 + gain_high)
    else:
        low, high = gain_low * low.to(DTYPE).to(tl.float32), gain_high * high.to(DTYPE).to(tl.float32)
    return low.to(DTYPE).to(tl.float32), high.to(DTYPE).to(tl.float32)


@triton.jit(do_not_specialize=["width"])
def _rotate_write(
    packed,  # [tokens, (HEADS + 2 KV_HEADS) * 2 HALF]
    q,  # [tokens, HEADS * 2 HALF]
    cos,  # [positions, HALF]
    sin,
    q_norm,
    k_norm,
    table,  # int64 [slices, width]
    width,
    places,  # int32 [tokens, 2]: position, slice; a negative position: padding
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    HALF_UP: tl.constexpr,
    CHUNK: tl.constexpr,
    BYTES: tl.constexpr,
    NORM: tl.constexpr,
    GEMMA: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position, which = tl.load(places + token * 2), tl.load(places + token * 2 + 1)
    if position >= 0:
        dtype: tl.constexpr = q.dtype.element_ty
        SHARED: tl.constexpr = HEADS // KV_HEADS
        DIM: tl.constexpr = 2 * HALF
        d = tl.arange(0, HALF_UP)
        there = d < HALF
        c = tl.load(cos + position.to(tl.int64) * HALF + d, mask=there, other=0.0).to(tl.float32)[None, :]
        s = tl.load(sin + position.to(tl.int64) * HALF + d, mask=there, other=0.0).to(tl.float32)[None, :]
        row = packed + token * (HEADS + 2 * KV_HEADS) * DIM

        # The query heads of this KV head.
        h = tl.arange(0, GROUP)
        inside = (h < SHARED)[:, None] & there[None, :]
        at = (head * SHARED + h)[:, None] * DIM + d[None, :]
        low = tl.load(row + at, mask=inside, other=0.0).to(tl.float32)
        high = tl.load(row + at + HALF, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            low, high = _normed(low, high, q_norm, d, eps, HALF, dtype, GEMMA)
        to = q + token * HEADS * DIM
        tl.store(to + at, (low * c - high * s).to(dtype), mask=inside)
        tl.store(to + at + HALF, (high * c + low * s).to(dtype), mask=inside)

        # Its key and value, into their page.
        one = tl.arange(0, 1)
        kin = (one < 1)[:, None] & there[None, :]
        k_at = (HEADS + head) * DIM + one[:, None] * DIM + d[None, :]
        low = tl.load(row + k_at, mask=kin, other=0.0).to(tl.float32)
        high = tl.load(row + k_at + HALF, mask=kin, other=0.0).to(tl.float32)
        if NORM:
            low, high = _normed(low, high, k_norm, d, eps, HALF, dtype, GEMMA)
        page = tl.load(table + which.to(tl.int64) * width + position // CHUNK)
        page = tl.multiple_of((page + (head * 2 * CHUNK + position % CHUNK) * (DIM * BYTES)), 8).to(
            tl.pointer_type(dtype)
        )
        p_at = one[:, None] * DIM + d[None, :]
        tl.store(page + p_at, (low * c - high * s).to(dtype), mask=kin)
        tl.store(page + p_at + HALF, (high * c + low * s).to(dtype), mask=kin)
        v_at = k_at + KV_HEADS * DIM
        tl.store(page + CHUNK * DIM + p_at, tl.load(row + v_at, mask=kin, other=0.0), mask=kin)
        tl.store(page + CHUNK * DIM + p_at + HALF, tl.load(row + v_at + HALF, mask=kin, other=0.0), mask=kin)


@triton.jit
def _gate_mul(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + i, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + i, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    slope = wide
    if GELU:  # by tanh: x / 2 * (1 + tanh(y)) = x / (1 + exp(-2 y))
        slope = 1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)
    gated = (wide / (1.0 + tl.exp(-slope))).to(gate.dtype)
    tl.store(out + row * WIDTH + i, (gated.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=inside)


def add_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor, gemma: bool
) -> None:
    """Adds `delta`, if given, to `x`; then `out`, which may be x, = root-mean-square norm of x times `weight`. All are
    `[rows, hidden]`. gemma: times 1 + `weight`."""
    rows, hidden = x.shape
    warps = 8 if hidden >= 4096 else 4
    up = triton.next_power_of_2(hidden)
    _add_norm[(rows,)](
        x, x if delta is None else delta, weight, out, eps, hidden, up, delta is not None, gemma, num_warps=warps
    )


def rotate_write(
    packed: torch.Tensor,
    q: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    table: torch.Tensor,
    places: torch.Tensor,
    heads: int,
    kv_heads: int,
    chunk_tokens: int,
    gemma: bool,
) -> None:
    """Rotates the queries of `packed` (q, k and v concatenated) into `q`, and writes rotated keys, and values, to
    pages.

    packed `[tokens, (heads + 2 kv_heads) * head_dim]`, q `[tokens, heads * head_dim]`; cos and sin `[positions,
    head_dim / 2]`; norms: weights of the norms of queries and keys, applied before rotation (gemma: see `add_norm`);
    table int64 `[slices, width]`, byte addresses of one layer's pages; places int32 `[tokens, 2]`, position and slice
    of each token; a negative position marks padding, which is skipped.
    """
    half = cos.shape[1]
    q_norm, k_norm = norms or (cos, cos)
    _rotate_write[(packed.shape[0], kv_heads)](
        packed,
        q,
        cos,
        sin,
        q_norm,
        k_norm,
        table,
        table.stride(0),
        places,
        eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        GROUP=triton.next_power_of_2(heads // kv_heads),
        HALF=half,
        HALF_UP=triton.next_power_of_2(half),
        CHUNK=chunk_tokens,
        BYTES=q.dtype.itemsize,
        NORM=norms is not None,
        GEMMA=gemma,
        num_warps=1,
    )


def gate_mul(gate_up: torch.Tensor, out: torch.Tensor, gelu: bool = False) -> None:
    """`out [rows, width]` = silu, or gelu, of the first half of `gate_up [rows, 2 * width]`, times the second."""
    rows, width = out.shape
    block = 1024
    _gate_mul[(rows, triton.cdiv(width, block))](gate_up, out, width, block, gelu, num_warps=4)
