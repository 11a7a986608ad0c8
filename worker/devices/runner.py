"""One engine step: runs tokens of many sequences through the model, reading and writing paged KV.

The caller decides which sequences run, with how many tokens and on which pages. Matrix products take all tokens as one
packed batch; attention runs per sequence or group of sequences (`worker.models.attention`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from worker.memory.paged_kv import PagedKv
from worker.models import llama
from worker.models.attention import AttentionPlan, Query
from worker.models.load import Model
from worker.models.low_rank import groups_of


@dataclass(slots=True)
class Slice:
    """One sequence's part of a step.

    tokens: ids to compute, at least one. start: number of tokens before them, whose KV exists.
    pages: int64 `[layers, ceil((start + len(tokens)) / chunk_tokens)]`, page ids.
    want_logits: whether to return the logits of the last token.
    adapter: the number of the sequence's LoRA adapter among its model's; -1: none.
    """

    tokens: list[int]
    start: int
    pages: np.ndarray
    want_logits: bool
    adapter: int = -1


class Steps(Protocol):
    """A runner: `Runner`, `worker.devices.cpu.native_runner.NativeRunner` or the CUDA runner."""

    def step(
        self, slices: list[Slice], before_layer: Callable[[int], None], after_layer: Callable[[int], None]
    ) -> torch.Tensor:
        """See `Runner.step`."""
        ...


class Runner:
    """Computes steps of `model` over `kv` with torch. Keeps no state between steps."""

    def __init__(self, model: Model, kv: PagedKv) -> None:
        self.model = model
        self.kv = kv

    @torch.inference_mode()
    def step(
        self, slices: list[Slice], before_layer: Callable[[int], None], after_layer: Callable[[int], None]
    ) -> torch.Tensor:
        """Returns logits, float32 `[slices with want_logits, vocab]`, in order, and writes the tokens' KV to their
        pages.

        `before_layer(l)` is called before layer l reads or writes KV (after its queries are computed, to give transfers
        more time), `after_layer(l)` when layer l's KV of this step is written. An exception in either ends the step;
        running the same slices again is safe. New pages are zeroed past the slice's tokens. Slices may share pages that
        they only read. Raises ValueError for a slice that does not fit its pages or the model.
        """
        model, kv, c = self.model, self.kv, self.model.config
        check(slices, kv, model)
        if not slices:
            return torch.empty(0, c.vocab_size)
        queries, row = [], 0
        for s in slices:
            queries.append(Query(row, len(s.tokens), s.start, s.pages))
            row += len(s.tokens)
        wanted = [q for q, s in zip(queries, slices, strict=True) if s.want_logits]
        # The last layer computes only the last tokens, which the logits need.
        lasts = [Query(i, 1, q.start + q.count - 1, q.pages) for i, q in enumerate(wanted)]
        last_rows = torch.tensor([q.row + q.count - 1 for q in wanted], dtype=torch.int64)

        adapted = groups_of([s.adapter for s in slices], [len(s.tokens) for s in slices])
        adapted_lasts = groups_of([s.adapter for s in slices if s.want_logits], [1] * len(lasts))
        places = _Places(slices, kv.shape.chunk_tokens)
        plans = {window: AttentionPlan(kv, queries, window, c.attention_scale) for window in set(c.windows[:-1])}
        last_plan = AttentionPlan(kv, lasts, c.windows[-1], c.attention_scale)
        longest = max(s.start + len(s.tokens) for s in slices)
        turned = {rope: rope.at(places.positions, longest) for rope in model.ropes()}
        x = llama.embed(model.top, c, torch.tensor([t for s in slices for t in s.tokens]))
        for layer in range(c.layers):
            weights = model.layers.acquire(layer)
            q, k, v = llama.project(weights, c, x, *turned[model.rope_of(layer)], adapted)
            before_layer(layer)
            places.write(kv, layer, k, v)
            after_layer(layer)
            if layer < c.layers - 1:
                attended = plans[c.windows[layer]].attend(layer, q)
            else:
                x, attended, adapted = x[last_rows], last_plan.attend(layer, q[last_rows]), adapted_lasts
            if x.shape[0]:
                x = llama.finish_layer(weights, c, x, attended, adapted)
            model.layers.computed(layer)
        return llama.logits(model.top, c, x)


def check(slices: list[Slice], kv: PagedKv, model: Model) -> None:
    """Raises ValueError for a slice that does not fit its pages or the model."""
    chunk, layers, vocabulary = kv.shape.chunk_tokens, model.config.layers, model.config.vocab_size
    for s in slices:
        end = s.start + len(s.tokens)
        if not s.tokens or s.start < 0 or end > model.max_tokens:
            raise ValueError(
                f"a slice of {len(s.tokens)} tokens from {s.start} does not fit a model of {model.max_tokens}"
            )
        if s.pages.dtype != np.int64 or s.pages.shape != (layers, -(-end // chunk)):
            raise ValueError(f"pages {s.pages.dtype} {s.pages.shape} do not cover {layers} layers of {end} tokens")
        if min(s.tokens) < 0 or max(s.tokens) >= vocabulary:
            raise ValueError(f"a token id is outside the vocabulary of {vocabulary}")
        if not -1 <= s.adapter < len(model.adapters.each):
            raise ValueError(f"there is no adapter {s.adapter}")


class _Places:
    """Positions of a step's tokens, and the page and offset of each, per layer."""

    def __init__(self, slices: list[Slice], chunk: int) -> None:
        positions = [np.arange(s.start, s.start + len(s.tokens)) for s in slices]
        every = np.concatenate(positions)
        self.positions = torch.from_numpy(every)
        self._offsets = torch.from_numpy(every % chunk)
        pages = np.concatenate([s.pages[:, at // chunk] for s, at in zip(slices, positions, strict=True)], axis=1)
        self._pages = torch.from_numpy(pages)
        # Pages that this step begins and does not fill.
        begun = [
            s.pages[:, -1]
            for s, at in zip(slices, positions, strict=True)
            if (at[-1] + 1) % chunk and s.start <= at[-1] // chunk * chunk
        ]
        self._begun = torch.from_numpy(np.stack(begun, axis=1)) if begun else None

    def write(self, kv: PagedKv, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes the tokens' `k` and `v` of `layer`; zeroes new, partly written pages first."""
        if self._begun is not None:
            kv.clear(self._begun[layer])
        kv.write(self._pages[layer], self._offsets, k, v)
