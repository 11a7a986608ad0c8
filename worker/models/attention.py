"""Attention in torch over paged KV: which tokens of a step are computed together, and over which pages.

Slices of several tokens (prefill) attend one by one. Single tokens (decode, and the last layer of a prefill) attend in
batches of similar length, so that a layer needs few kernel calls. Query heads share K and V heads by strides, without
copies.

The plan of a step is valid for all layers with the same window; only page ids differ between layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from worker.memory.paged_kv import PagedKv

#: Sequences share a batch when the shortest has at least this share of the longest one's pages.
_SIMILAR = 0.6
_FEW_PAGES = 4


@dataclass(slots=True)
class Query:
    """Tokens of one sequence: rows `row .. row + count` of the step, at positions `start .. start + count`.

    pages: int64 `[layers, pages]`, of the sequence up to the last of these tokens.
    """

    row: int
    count: int
    start: int
    pages: np.ndarray


@dataclass(slots=True)
class _Many:
    """Several tokens of one sequence. keys: number of gathered tokens that exist. mask None: causal."""

    row: int
    count: int
    pages: torch.Tensor
    keys: int
    mask: torch.Tensor | None


@dataclass(slots=True)
class _Singles:
    """One token each of several sequences. pages `[layers, sequences, n]`, mask `[sequences, 1, 1, n *
    chunk_tokens]`."""

    rows: torch.Tensor
    pages: torch.Tensor
    mask: torch.Tensor


class AttentionPlan:
    """How `queries` attend over `kv` in layers whose window is `window`. scale: of scores; None: 1 / sqrt(head_dim)."""

    def __init__(self, kv: PagedKv, queries: Sequence[Query], window: int | None, scale: float | None = None) -> None:
        self._kv, self._scale = kv, scale
        self._chunk = kv.shape.chunk_tokens
        self._many = [self._plan_many(q, window) for q in queries if q.count > 1]
        singles = sorted(
            (q for q in queries if q.count == 1), key=lambda q: self._first_page(q, window) - q.start // self._chunk
        )
        self._groups = [self._plan_singles(group, window) for group in self._similar(singles, window)]

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """`[tokens, heads * head_dim]` for `q [tokens, heads, head_dim]`; reads the pages of `layer`."""
        s = self._kv.shape
        group = q.shape[1] // s.kv_heads
        out = torch.empty_like(q)
        for m in self._many:
            runs = self._kv.gather_heads(m.pages[layer][None])[0]
            rows = slice(m.row, m.row + m.count)
            k, v = (runs[:, i, None, : m.keys].expand(-1, group, -1, -1) for i in (0, 1))
            queries = q[rows].view(m.count, s.kv_heads, group, s.head_dim).permute(1, 2, 0, 3)
            attended = F.scaled_dot_product_attention(
                queries, k, v, attn_mask=m.mask, is_causal=m.mask is None, scale=self._scale
            )
            out[rows] = attended.permute(2, 0, 1, 3).reshape(m.count, q.shape[1], s.head_dim)
        for g in self._groups:
            runs = self._kv.gather_heads(g.pages[layer])
            queries = q[g.rows].view(-1, s.kv_heads, group, s.head_dim)
            attended = F.scaled_dot_product_attention(
                queries, runs[:, :, 0], runs[:, :, 1], attn_mask=g.mask, scale=self._scale
            )
            out[g.rows] = attended.reshape(-1, q.shape[1], s.head_dim)
        return out.flatten(1)

    def _first_page(self, query: Query, window: int | None) -> int:
        """The first page that is within the window of any token of `query`."""
        return max(0, query.start - window + 1) // self._chunk if window else 0

    def _plan_many(self, query: Query, window: int | None) -> _Many:
        first, end = self._first_page(query, window), query.start + query.count
        begin = first * self._chunk
        mask = None
        if query.start or (window and window < query.count):
            positions = torch.arange(query.start, end)[:, None]
            mask = _mask(positions, torch.arange(begin, end)[None], window, self._kv.dtype)
        pages = torch.from_numpy(query.pages[:, first : -(-end // self._chunk)])
        return _Many(query.row, query.count, pages, end - begin, mask)

    def _similar(self, queries: Sequence[Query], window: int | None) -> list[list[Query]]:
        """Splits `queries`, longest first, into batches that padding does not enlarge much."""
        groups: list[list[Query]] = []
        longest = 0
        for query in queries:
            pages = query.start // self._chunk + 1 - self._first_page(query, window)
            if not groups or (pages < longest * _SIMILAR and longest > _FEW_PAGES):
                groups.append([])
                longest = pages
            groups[-1].append(query)
        return groups

    def _plan_singles(self, queries: Sequence[Query], window: int | None) -> _Singles:
        firsts = [self._first_page(q, window) for q in queries]
        widths = [q.start // self._chunk + 1 - first for q, first in zip(queries, firsts, strict=True)]
        # Padding repeats a page of the sequence: it is mapped, finite and masked.
        pages = np.empty((queries[0].pages.shape[0], len(queries), max(widths)), dtype=np.int64)
        for i, (query, first, width) in enumerate(zip(queries, firsts, widths, strict=True)):
            pages[:, i, :width] = query.pages[:, first : first + width]
            pages[:, i, width:] = query.pages[:, first, None]
        positions = torch.tensor([[q.start] for q in queries])
        keys = torch.tensor([[first * self._chunk] for first in firsts]) + torch.arange(max(widths) * self._chunk)
        mask = _mask(positions, keys, window, self._kv.dtype)
        return _Singles(torch.tensor([q.row for q in queries]), torch.from_numpy(pages), mask[:, None, None])


def _mask(positions: torch.Tensor, keys: torch.Tensor, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """0 where the token at `positions` sees the one at `keys`, -inf elsewhere; shapes broadcast."""
    hidden = keys > positions
    if window:
        hidden |= keys <= positions - window
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
