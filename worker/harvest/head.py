"""The last norm, the head and the cross-entropy of one example's target tokens, and their gradient, in units.

Only rows that predict a target token are computed, a fixed number at a time; their logits, a fixed number of the
vocabulary's tokens at a time, so that a large vocabulary makes no long unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from runtime.model_config import ModelConfig
from worker.harvest.adapter import Empty
from worker.harvest.lanes import Chain
from worker.models.llama import rms_norm
from worker.models.weights import TopWeights

_Unit = Callable[[TopWeights], None]


class HeadScratch:
    """Memory of one example at the head: normed rows `[rows, hidden]`, their logits `[rows, vocab]` (later the logits'
    gradient) and the normed rows' gradient, in float32."""

    def __init__(self, c: ModelConfig, rows: int, dtype: torch.dtype, empty: Empty) -> None:
        self.normed = empty((rows, c.hidden_size), dtype)
        self.logits = empty((rows, c.vocab_size), torch.float32)
        self.dnormed = empty((rows, c.hidden_size), torch.float32)


@dataclass(frozen=True, slots=True)
class HeadPass:
    """One example's way through the head. at `[targets]`: the rows that predict `labels [targets]`. rows: of a unit;
    columns: tokens of the vocabulary of a unit."""

    config: ModelConfig
    at: torch.Tensor
    labels: torch.Tensor
    rows: int
    columns: int

    def loss(
        self, x: torch.Tensor, losses: list[float], scratch: HeadScratch, dx: torch.Tensor | None = None
    ) -> Chain[TopWeights]:
        """Units that append sums of the targets' cross-entropy to `losses`, given the last layer's output `x [tokens,
        hidden]`. dx `[tokens, hidden]`: filled with the sum's gradient; None: no gradient is computed."""
        if dx is not None:
            dx.zero_()
        for first in range(0, len(self.at), self.rows):
            at, labels = self.at[first : first + self.rows], self.labels[first : first + self.rows]
            normed, logits, dnormed = (t[: len(at)] for t in (scratch.normed, scratch.logits, scratch.dnormed))

            def entropy(_: TopWeights, labels: torch.Tensor = labels, logits: torch.Tensor = logits) -> None:
                with torch.no_grad():
                    losses.append(F.cross_entropy(logits, labels, reduction="sum").item())
                    if dx is not None:
                        torch.softmax(logits, -1, out=logits)
                        logits[torch.arange(len(labels)), labels] -= 1

            yield self._norm(x, at, normed, dnormed)
            for columns in self._columns():
                yield self._logits(columns, normed, logits)
            yield entropy
            if dx is not None:
                for columns in self._columns():
                    yield self._back(columns, logits, dnormed, x.dtype)
                yield self._norm_back(x, at, dnormed, dx)

    def _columns(self) -> Iterator[slice]:
        for first in range(0, self.config.vocab_size, self.columns):
            yield slice(first, min(first + self.columns, self.config.vocab_size))

    def _norm(self, x: torch.Tensor, at: torch.Tensor, normed: torch.Tensor, dnormed: torch.Tensor) -> _Unit:
        def unit(top: TopWeights) -> None:
            with torch.no_grad():
                normed.copy_(rms_norm(x[at], top.norm, self.config.norm_eps))
                dnormed.zero_()

        return unit

    def _logits(self, columns: slice, normed: torch.Tensor, logits: torch.Tensor) -> _Unit:
        def unit(top: TopWeights) -> None:
            with torch.no_grad():
                logits[:, columns] = F.linear(normed, top.head[columns])

        return unit

    def _back(self, columns: slice, logits: torch.Tensor, dnormed: torch.Tensor, dtype: torch.dtype) -> _Unit:
        def unit(top: TopWeights) -> None:
            with torch.no_grad():
                dnormed.add_(logits[:, columns].to(dtype) @ top.head[columns])

        return unit

    def _norm_back(self, x: torch.Tensor, at: torch.Tensor, dnormed: torch.Tensor, dx: torch.Tensor) -> _Unit:
        def unit(top: TopWeights) -> None:
            here = x[at].requires_grad_()
            with torch.enable_grad():
                normed = rms_norm(here, top.norm, self.config.norm_eps)
            [dx[at]] = torch.autograd.grad(normed, [here], dnormed.to(x.dtype))

        return unit
