"""Paged attention against a float64 reference: prefill and decode, windows, shared heads, odd sizes, pages anywhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.gpu.harness import DEVICE, HERE
from worker.kernels.cuda.attention import SPLIT_TOKENS, AttentionShape, attend, attend_split

pytestmark = HERE
SHAPE = AttentionShape(heads=8, kv_heads=2, head_dim=64, chunk_tokens=32, dtype=torch.float32)
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


class Pages:
    """Keys and values of some sequences, on pages that are scattered over one buffer; what was never written is NaN."""

    def __init__(self, shape: AttentionShape, lengths: list[int], seed: int = 0) -> None:
        s, generator = shape, torch.Generator().manual_seed(seed)
        self.shape, self.lengths = shape, lengths
        counts = [-(-n // s.chunk_tokens) for n in lengths]
        total = sum(counts) + 3
        self.buffer = torch.full(
            (total, s.kv_heads, 2, s.chunk_tokens, s.head_dim), float("nan"), dtype=s.dtype, device=DEVICE
        )
        order = torch.randperm(total, generator=generator).tolist()
        self.table = torch.zeros(len(lengths), max(counts) + 2, dtype=torch.int64)
        self.keys, self.values = [], []
        for i, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            mine = [order.pop() for _ in range(count)]
            self.table[i, :count] = torch.tensor([self.buffer[p].data_ptr() for p in mine])
            kv = torch.randn(2, length, s.kv_heads, s.head_dim, generator=generator).to(s.dtype)
            for at in range(length):
                self.buffer[mine[at // s.chunk_tokens], :, :, at % s.chunk_tokens] = (
                    kv[:, at].transpose(0, 1).to(DEVICE)
                )
            self.keys.append(kv[0])
            self.values.append(kv[1])
        self.table = self.table.to(DEVICE)

    def expected(self, i: int, q: torch.Tensor, start: int, window: int | None) -> torch.Tensor:
        """float64 `[tokens, heads, head_dim]` for `q`, at positions from `start`."""
        s = self.shape
        end, shared = start + len(q), s.heads // s.kv_heads
        k, v = (t[:end].double().repeat_interleave(shared, 1) for t in (self.keys[i], self.values[i]))
        scores = torch.einsum("qhd,khd->hqk", q.double().cpu(), k) / s.head_dim**0.5
        at, key = torch.arange(start, end)[:, None], torch.arange(end)
        hidden = key > at
        if window:
            hidden |= key <= at - window
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


def run(
    pages: Pages, parts: list[tuple[int, int, int]], window: int | None = None, seed: int = 1
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(got, q) for `parts`: sequence, first position, count; all in one launch of the prefill kernel."""
    s = pages.shape
    total = sum(count for *_, count in parts)
    q = torch.randn(total, s.heads, s.head_dim, generator=torch.Generator().manual_seed(1)).to(s.dtype).to(DEVICE)
    out = torch.full((total, s.heads * s.head_dim), float("nan"), dtype=s.dtype, device=DEVICE)
    tiles = s.tiles(prefill=True)
    each = tiles.rows // s.group
    slices, blocks, row = [], [], 0
    for i, (_, start, count) in enumerate(parts):
        slices.append([row, count, start, row])
        blocks += [[i, first] for first in range(0, count, each)]
        row += count
    table = pages.table[[sequence for sequence, *_ in parts]].contiguous()
    attend(s, tiles, q.view(total, -1), out, table, ints(slices), ints(blocks), window)
    rows = [slice(row, row + count) for row, count, *_ in slices]
    return [(out[r].view(-1, s.heads, s.head_dim), q[r]) for r in rows]


def decode(
    pages: Pages, q: torch.Tensor, positions: list[int], window: int | None = None, splits: int = 0
) -> torch.Tensor:
    """One token of each sequence, at `positions`; negative: padding."""
    s, n = pages.shape, len(positions)
    splits = splits or max(positions) // SPLIT_TOKENS + 1
    out = torch.full((n, s.heads * s.head_dim), float("nan"), dtype=s.dtype, device=DEVICE)
    parts = torch.full((n, s.heads, splits, s.head_dim), float("nan"), device=DEVICE)
    stats = torch.full((n, s.heads, splits, 2), float("nan"), device=DEVICE)
    slices = ints([[i, int(at >= 0), max(at, 0), i] for i, at in enumerate(positions)])
    blocks = ints([[i, 0] for i in range(n)])
    attend_split(s, s.tiles(prefill=False), q.view(n, -1), out, pages.table, slices, blocks, window, parts, stats)
    return out.view(n, s.heads, s.head_dim)


def ints(rows: list[list[int]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32, device=DEVICE)


def queries(shape: AttentionShape, count: int, seed: int = 2) -> torch.Tensor:
    return (
        torch.randn(count, shape.heads, shape.head_dim, generator=torch.Generator().manual_seed(seed))
        .to(shape.dtype)
        .to(DEVICE)
    )


def close(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert torch.isfinite(got).all()
    error = (got.double().cpu() - expected).norm() / expected.norm()
    assert error < TOLERANCE[dtype], f"relative error {error:.2e}"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("window", [None, 40])
def test_prefill_of_several_sequences_agrees_with_float64(dtype: torch.dtype, window: int | None) -> None:
    shape = replace(SHAPE, dtype=dtype)
    pages = Pages(shape, [70, 7, 65])
    parts = [(0, 20, 50), (1, 0, 7), (2, 33, 32)]
    for (got, q), (sequence, start, _) in zip(run(pages, parts, window), parts, strict=True):
        close(got, pages.expected(sequence, q, start, window), dtype)


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, *(pytest.param(t, marks=pytest.mark.slow) for t in (torch.float32, torch.float16))],
    ids=str,
)
@pytest.mark.parametrize("window", [None, 300])
def test_decode_over_several_parts_agrees_with_float64(dtype: torch.dtype, window: int | None) -> None:
    shape = replace(SHAPE, dtype=dtype)
    lengths = [2 * SPLIT_TOKENS + 77, 5, SPLIT_TOKENS, SPLIT_TOKENS + 1]
    pages, q = Pages(shape, lengths), queries(shape, 4)
    got = decode(pages, q, [n - 1 for n in lengths], window)
    for i, length in enumerate(lengths):
        close(got[i : i + 1], pages.expected(i, q[i : i + 1], length - 1, window), dtype)


@pytest.mark.parametrize(
    "shape",
    [
        AttentionShape(6, 2, 80, 48, torch.float32),
        pytest.param(AttentionShape(4, 4, 128, 64, torch.bfloat16), marks=pytest.mark.slow),
        pytest.param(AttentionShape(16, 1, 32, 16, torch.float16), marks=pytest.mark.slow),
        AttentionShape(14, 2, 64, 128, torch.bfloat16),
    ],
    ids=str,
)
def test_other_heads_widths_and_pages(shape: AttentionShape) -> None:
    pages = Pages(shape, [70, 130])
    for (got, q), (i, start) in zip(run(pages, [(0, 60, 10), (1, 0, 130)]), [(0, 60), (1, 0)], strict=True):
        close(got, pages.expected(i, q, start, None), shape.dtype)
    q = queries(shape, 2)
    got = decode(pages, q, [69, 129])
    for i, length in enumerate(pages.lengths):
        close(got[i : i + 1], pages.expected(i, q[i : i + 1], length - 1, None), shape.dtype)


def test_a_decoded_row_has_the_same_bits_whatever_it_is_batched_with() -> None:
    shape = replace(SHAPE, dtype=torch.bfloat16)
    pages, q = Pages(shape, [300, 17, 520]), queries(shape, 3)
    together = decode(pages, q, [299, 16, 519], splits=8)
    for i, length in enumerate(pages.lengths):
        alone = [-1] * 3
        alone[i] = length - 1
        got = decode(pages, q, alone)
        assert torch.equal(got[i], together[i])
        assert all(torch.isnan(got[j]).all() for j in range(3) if j != i), "padding is left alone"


@pytest.mark.usefixtures("rows_multiplied_alone")
def test_a_prefilled_row_has_the_same_bits_however_its_prompt_is_cut() -> None:
    shape = replace(SHAPE, dtype=torch.bfloat16)
    pages = Pages(shape, [120])
    [(whole, q)] = run(pages, [(0, 0, 120)])
    tiles = shape.tiles(prefill=True)
    for start, end in ((0, 1), (1, 50), (50, 51), (51, 120)):
        out = torch.empty(end - start, shape.heads * shape.head_dim, dtype=shape.dtype, device=DEVICE)
        blocks = [[0, first] for first in range(0, end - start, tiles.rows // shape.group)]
        part = q[start:end].reshape(end - start, -1)
        attend(shape, tiles, part, out, pages.table, ints([[0, end - start, start, 0]]), ints(blocks), None)
        assert torch.equal(out.view(-1, shape.heads, shape.head_dim), whole[start:end])
