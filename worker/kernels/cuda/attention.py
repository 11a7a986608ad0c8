"""Attention over pages `[kv_heads][K, V][chunk][head_dim]`, read in place, for prefill and decode.

One kernel serves both. A program computes some query tokens of one sequence, for all query heads that share a KV head.
It reads the keys in tiles that begin at multiples of `tile` tokens, with a running maximum (FlashAttention-2). Decode
splits the keys over programs at multiples of SPLIT_TOKENS (Flash-Decoding), and a second kernel merges the parts in
ascending order. Splits depend on positions only, so a row's bits do not depend on the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from worker.kernels.cuda.dot import dot, widens

#: Keys that one decode program reads. 256 keeps 132 multiprocessors busy with one sequence of about 4,000 tokens and 8
#: KV heads; writing and merging parts adds about 3 % to the bytes read (head_dim 128, 4 query heads per KV head).
SPLIT_TOKENS = 256
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tile shapes of one launch. rows: query rows (tokens x heads of a group) per program; keys: tokens per tile."""

    rows: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Constants of all launches for one model and page size. scale: of scores; 0: 1 / sqrt(head_dim)."""

    heads: int
    kv_heads: int
    head_dim: int
    chunk_tokens: int
    dtype: torch.dtype
    scale: float = 0.0

    @property
    def group(self) -> int:
        """Query heads that share a KV head, rounded up to a power of two."""
        return int(triton.next_power_of_2(self.heads // self.kv_heads))

    def tiles(self, prefill: bool) -> Tiles:
        """Shapes for Hopper's shared memory and tensor cores; smaller for float32, whose tiles are twice as large."""
        wide = self.dtype == torch.float32
        most = 32 if wide and self.head_dim > 128 else 64
        keys = min(most, self.chunk_tokens & -self.chunk_tokens)  # a tile lies in one page
        if wide or not prefill:
            return Tiles(max(16, self.group), keys, 4, 2 if wide else 3)
        return Tiles(max(128 if self.head_dim <= 128 else 64, self.group), keys, 8, 2)


@triton.jit(do_not_specialize=["width", "splits"])
def _attend(
    q,  # [tokens, HEADS, DIM]
    out,  # [rows, HEADS, DIM]
    parts,  # float32 [blocks, HEADS, splits, DIM]: sums of a part's values by their weights; unused when SPLIT is 0
    stats,  # float32 [blocks, HEADS, splits, 2]: a part's maximum and sum of weights
    table,  # int64 [slices, width]: addresses of one layer's pages
    width,
    slices,  # int32 [slices, 4]: first row of q, count of tokens, first position, first row of out
    blocks,  # int32 [blocks, 2]: slice, first of its tokens
    scale,  # of scores, divided by ln 2
    splits,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,  # query heads that share a KV head
    GROUP: tl.constexpr,  # the same, rounded up to a power of two
    DIM: tl.constexpr,
    DIM_UP: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,  # tokens that a token sees, its own included; 0: all
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,  # keys a program reads; 0: all
    BYTES: tl.constexpr,  # of an element
    WIDEN: tl.constexpr,
):
    TOKENS: tl.constexpr = ROWS // GROUP
    block, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    which, first = tl.load(blocks + block * 2), tl.load(blocks + block * 2 + 1)
    row, count = tl.load(slices + which * 4), tl.load(slices + which * 4 + 1)
    start, out_row = tl.load(slices + which * 4 + 2), tl.load(slices + which * 4 + 3)
    last = start + tl.minimum(first + TOKENS, count) - 1  # the last position that this program computes for
    low, high = 0, last + 1
    if WINDOW > 0:
        low = tl.maximum(start + first - WINDOW + 1, 0)
    if SPLIT > 0:
        low, high = tl.maximum(low, split * SPLIT), tl.minimum(high, (split + 1) * SPLIT)
    # A padding row of a batch has no tokens; a part behind the window or past the end has no keys.
    if (count > first) & (low < high):
        r = tl.arange(0, ROWS)
        token, shared = first + r // GROUP, r % GROUP
        real = (token < count) & (shared < SHARED)
        position = start + token
        d = tl.arange(0, DIM_UP)
        mine = (row + token).to(tl.int64) * HEADS + head * SHARED + shared
        inside = real[:, None] & (d < DIM)[None, :]
        queries = tl.load(q + mine[:, None] * DIM + d[None, :], mask=inside, other=0.0)
        maximum = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        values = tl.zeros([ROWS, DIM_UP], tl.float32)
        t = tl.arange(0, TILE)
        within = t[:, None] * DIM + d[None, :]
        for tile in range(low // TILE, (high + TILE - 1) // TILE):
            page = tl.multiple_of(tl.load(table + which.to(tl.int64) * width + tile * TILE // CHUNK), 16)
            at = page + (head * 2 * CHUNK + tile * TILE % CHUNK) * (DIM * BYTES)
            keys_at = tl.multiple_of(at.to(tl.pointer_type(q.dtype.element_ty)), 16)
            key = tile * TILE + t
            # What lies past the last token was never written; it may be anything, and NaN times zero is NaN.
            known = (key <= last)[:, None] & (d < DIM)[None, :]
            k = tl.load(keys_at + within, mask=known, other=0.0)
            v = tl.load(keys_at + CHUNK * DIM + within, mask=known, other=0.0)
            scores = dot(queries, tl.trans(k), WIDEN) * scale
            seen = key[None, :] <= position[:, None]
            if WINDOW > 0:
                seen = seen & (key[None, :] > position[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
            higher = tl.maximum(maximum, tl.max(scores, 1))
            finite = tl.where(higher == float("-inf"), 0.0, higher)  # no key of this row yet: weights are exact zeros
            kept = tl.exp2(maximum - finite)
            weights = tl.exp2(scores - finite[:, None])
            total = total * kept + tl.sum(weights, 1)
            values = values * kept[:, None] + dot(weights.to(v.dtype), v, WIDEN)
            maximum = higher
        if SPLIT > 0:
            part = (block.to(tl.int64) * HEADS + head * SHARED + shared) * splits + split
            tl.store(parts + part[:, None] * DIM + d[None, :], values, mask=inside)
            tl.store(stats + part * 2, maximum, mask=real)
            tl.store(stats + part * 2 + 1, total, mask=real)
        else:
            to = (out_row + token).to(tl.int64) * HEADS + head * SHARED + shared
            result = values / tl.where(total > 0, total, 1.0)[:, None]
            tl.store(out + to[:, None] * DIM + d[None, :], result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["splits"])
def _merge(
    out,
    parts,
    stats,
    slices,
    blocks,
    splits,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_UP: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
):
    block, head = tl.program_id(0), tl.program_id(1)
    which = tl.load(blocks + block * 2)
    count, position = tl.load(slices + which * 4 + 1), tl.load(slices + which * 4 + 2)
    if count > 0:
        to = tl.load(slices + which * 4 + 3).to(tl.int64) * HEADS + head
        oldest = 0
        if WINDOW > 0:
            oldest = tl.maximum(position - WINDOW + 1, 0)
        d = tl.arange(0, DIM_UP)
        maximum, total = float("-inf"), 0.0
        values = tl.zeros([DIM_UP], tl.float32)
        for split in range(oldest // SPLIT, position // SPLIT + 1):
            part = (block.to(tl.int64) * HEADS + head) * splits + split
            its_maximum, its_total = tl.load(stats + part * 2), tl.load(stats + part * 2 + 1)
            higher = tl.maximum(maximum, its_maximum)
            kept, added = tl.exp2(maximum - higher), tl.exp2(its_maximum - higher)
            total = total * kept + its_total * added
            values = values * kept + tl.load(parts + part * DIM + d, mask=d < DIM, other=0.0) * added
            maximum = higher
        tl.store(out + to * DIM + d, (values / total).to(out.dtype.element_ty), mask=d < DIM)


def attend(
    shape: AttentionShape,
    tiles: Tiles,
    q: torch.Tensor,
    out: torch.Tensor,
    table: torch.Tensor,
    slices: torch.Tensor,
    blocks: torch.Tensor,
    window: int | None,
) -> None:
    """Attention of the query tokens in `blocks`; each program reads all keys of its tokens.

    q `[tokens, heads * head_dim]`, out `[rows, heads * head_dim]`; table int64 `[slices, width]`, byte addresses of
    pages; slices int32 `[slices, 4]` (first row of q, count, first position, first row of out); blocks int32 `[blocks,
    2]` (slice, first token).
    """
    _launch(shape, tiles, q, out, out, out, table, slices, blocks, window, 0, 1)


def attend_split(
    shape: AttentionShape,
    tiles: Tiles,
    q: torch.Tensor,
    out: torch.Tensor,
    table: torch.Tensor,
    slices: torch.Tensor,
    blocks: torch.Tensor,
    window: int | None,
    parts: torch.Tensor,
    stats: torch.Tensor,
) -> None:
    """Like `attend`, for slices of one token, with the keys split over programs.

    blocks holds `(slice, 0)`. parts float32 `[blocks, heads, splits, head_dim]` and stats float32 `[blocks, heads,
    splits, 2]` are scratch; splits * SPLIT_TOKENS must cover the longest slice. A slice without tokens is padding; its
    row of out is not written.
    """
    splits = parts.shape[2]
    _launch(shape, tiles, q, out, parts, stats, table, slices, blocks, window, SPLIT_TOKENS, splits)
    dim_up = triton.next_power_of_2(shape.head_dim)
    grid = (blocks.shape[0], shape.heads)
    _merge[grid](
        out,
        parts,
        stats,
        slices,
        blocks,
        splits,
        shape.heads,
        shape.head_dim,
        dim_up,
        window or 0,
        SPLIT_TOKENS,
        num_warps=1,
    )


def _launch(
    shape: AttentionShape,
    tiles: Tiles,
    q: torch.Tensor,
    out: torch.Tensor,
    parts: torch.Tensor,
    stats: torch.Tensor,
    table: torch.Tensor,
    slices: torch.Tensor,
    blocks: torch.Tensor,
    window: int | None,
    split: int,
    splits: int,
) -> None:
    _attend[(blocks.shape[0], shape.kv_heads, splits)](
        q,
        out,
        parts,
        stats,
        table,
        table.stride(0),
        slices,
        blocks,
        (shape.scale or shape.head_dim**-0.5) * _LOG2_E,
        splits,
        HEADS=shape.heads,
        SHARED=shape.heads // shape.kv_heads,
        GROUP=shape.group,
        DIM=shape.head_dim,
        DIM_UP=max(16, triton.next_power_of_2(shape.head_dim)),
        CHUNK=shape.chunk_tokens,
        WINDOW=window or 0,
        ROWS=tiles.rows,
        TILE=tiles.keys,
        SPLIT=split,
        BYTES=shape.dtype.itemsize,
        WIDEN=widens(shape.dtype),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
