"""Low-rank products of LoRA adapters beside a product of a whole batch, with torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from worker.models import quantised
from worker.models.quantised import Matrix

#: Rows of a batch by adapter: its number, and its rows, int64.
Groups = Sequence[tuple[int, torch.Tensor]]


def groups_of(adapters: Sequence[int], counts: Sequence[int]) -> Groups:
    """The groups of slices with these adapters (-1: none) and numbers of rows."""
    if max(adapters, default=-1) < 0:
        return []
    numbers = torch.repeat_interleave(torch.tensor(adapters), torch.tensor(counts))
    return [(number, torch.where(numbers == number)[0]) for number in sorted(set(adapters)) if number >= 0]


def linear(
    x: torch.Tensor,
    weight: Matrix,
    bias: torch.Tensor | None,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    groups: Groups,
    segments: Sequence[int],
) -> torch.Tensor:
    """`x [rows, inputs]` times `weight`, once for all rows, plus each group's low-rank product.

    a, b: see `worker.models.adapters`; None: no adapter changes this product. segments: outputs of its projections.
    """
    out = quantised.linear(x, weight, bias)
    if a is None or b is None:
        return out
    rank = b.shape[-1]
    for number, rows in groups:
        low = torch.split(F.linear(x[rows], a[number]), rank, dim=-1)
        parts = torch.split(b[number], list(segments))
        out[rows] += torch.cat([F.linear(t, part) for t, part in zip(low, parts, strict=True)], dim=-1)
    return out
