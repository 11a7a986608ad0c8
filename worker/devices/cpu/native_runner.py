"""One engine step by the compiled CPU kernels: pages are read in place, and a layer is three calls.

A row's result depends on its tokens and positions only, not on the batch or on the split of its prefix into steps
(batch invariance). So greedy answers have equal bits in any batch and type.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from worker.devices.runner import Slice, check
from worker.kernels.cpu_kernels import PADDING, QUERY, Buffers, CpuKernels, PackedLayer
from worker.memory.paged_kv import PagedKv
from worker.models.llama import RopeTable
from worker.models.load import Model
from worker.models.weights import LayerWeights


class NativeRunner:
    """Like `Runner`; the model's matrices must be packed by the same kernels. Keeps its activations' memory between
    steps."""

    def __init__(self, model: Model, kv: PagedKv, kernels: CpuKernels) -> None:
        self.model = model
        self.kv = kv
        self._kernels = kernels.model(model.config, kv.shape.chunk_tokens, model.dtype, model.adapters.rank)
        self._memory: dict[str, torch.Tensor] = {}
        self._layers: dict[int, tuple[LayerWeights, PackedLayer]] = {}

    @torch.inference_mode()
    def step(
        self, slices: list[Slice], before_layer: Callable[[int], None], after_layer: Callable[[int], None]
    ) -> torch.Tensor:
        """See `worker.devices.runner.Runner.step`."""
        model, kv, c = self.model, self.kv, self.model.config
        check(slices, kv, model)
        wanted = [i for i, s in enumerate(slices) if s.want_logits]
        out = torch.empty(len(wanted), c.vocab_size)
        if not slices:
            return out
        counts = np.array([len(s.tokens) for s in slices])
        starts = np.array([s.start for s in slices])
        rows = np.cumsum(counts) - counts
        positions = np.arange(counts.sum()) + np.repeat(starts - rows, counts)
        # The sequences' page tables, concatenated: `[layers, pages of all]`.
        widths = np.array([s.pages.shape[1] for s in slices])
        firsts = np.cumsum(widths) - widths
        offsets = kv.offsets(np.concatenate([s.pages for s in slices], axis=1))
        queries = _queries(rows, counts, starts, rows, firsts, offsets)
        # The last layer computes only the last tokens, which the logits need.
        ends = rows + counts - 1
        lasts = _queries(ends, np.ones_like(counts), starts + counts - 1, np.zeros_like(rows), firsts, offsets)[wanted]
        lasts["out_row"] = np.arange(len(wanted))
        chunk = kv.shape.chunk_tokens
        token_pages = np.ascontiguousarray(offsets[:, np.repeat(firsts, counts) + positions // chunk])
        slots = (positions % chunk).astype(np.int32)

        tokens, base = len(positions), kv.span.address
        (buffers, x), turned = self._buffers(tokens), self._turned(positions)
        numbers = np.array([s.adapter for s in slices], np.int32)
        of_rows, of_lasts = np.repeat(numbers, counts), numbers[wanted]
        if adapted := bool(numbers.max() >= 0):
            buffers.adapt(of_rows)
        self._kernels.embed(model.top.embedding, np.array([t for s in slices for t in s.tokens], dtype=np.int64), x)
        for number in range(c.layers):
            layer = self._layer(number)
            buffers.cos, buffers.sin = (t.data_ptr() for t in turned[model.rope_of(number)])
            self._kernels.project(layer, buffers, tokens)
            before_layer(number)
            self._kernels.write(buffers, base, token_pages[number], slots)
            after_layer(number)
            if number < c.layers - 1:
                self._kernels.finish(layer, number, buffers, queries, tokens, base)
            elif wanted:
                if adapted:
                    buffers.adapt(of_lasts)
                x[: len(wanted)] = x[torch.from_numpy(ends[wanted])]
                self._kernels.finish(layer, number, buffers, lasts, len(wanted), base)
            model.layers.computed(number)
        if wanted:
            self._kernels.logits(model.top.norm, model.top.head, buffers, len(wanted), out)
        del of_rows, of_lasts  # the kernels read them until here
        return out

    def _layer(self, number: int) -> PackedLayer:
        """Acquires a layer and returns the addresses of its weights, looked up again when its slot was refilled."""
        weights = self.model.layers.acquire(number)
        known = self._layers.get(number)
        if known is None or known[0] is not weights:
            known = self._layers[number] = weights, self._kernels.layer(weights, self.model.config.windows[number])
        return known[1]

    def _buffers(self, tokens: int) -> tuple[Buffers, torch.Tensor]:
        """Memory of a step's activations, and x, which is among it."""
        c = self.model.config
        wide = max(c.hidden_size, c.heads * c.head_dim)
        widths = {
            "x": c.hidden_size,
            "a": wide + PADDING,
            "mid": c.intermediate_size + PADDING,
            "q": c.heads * c.head_dim,
            "kv": 2 * c.kv_heads * c.head_dim,
        }
        if e := c.experts:
            widths["mid"] = max(widths["mid"], e.per_token * (e.size + PADDING))
            widths |= {"routed": e.count, "spare": e.per_token * (c.hidden_size + PADDING)}
        if c.gemma:
            widths["spare"] = c.hidden_size + PADDING
        if self._kernels.low_width:
            widths["low"] = self._kernels.low_width
        for name, width in widths.items():
            if self._memory.get(name, torch.empty(0)).shape[0] < tokens:
                with torch.inference_mode(False):
                    self._memory[name] = torch.empty(1 << (tokens - 1).bit_length(), width)
        return Buffers(**{name: self._memory[name].data_ptr() for name in widths}), self._memory["x"]

    def _turned(self, positions: np.ndarray) -> dict[RopeTable, tuple[torch.Tensor, ...]]:
        """cos and sin `[tokens, head_dim]` of the tokens' positions, by rotary table."""
        at, longest = torch.from_numpy(positions), int(positions.max()) + 1
        ropes = self.model.ropes()
        return {rope: tuple(t[:, 0].float().contiguous() for t in rope.at(at, longest)) for rope in ropes}


def _queries(
    rows: np.ndarray,
    counts: np.ndarray,
    starts: np.ndarray,
    out_rows: np.ndarray,
    firsts: np.ndarray,
    offsets: np.ndarray,
) -> np.ndarray:
    made = np.zeros(len(rows), QUERY)
    made["row"], made["count"], made["start"], made["out_row"] = rows, counts, starts, out_rows
    made["pages"] = offsets.ctypes.data + firsts * offsets.itemsize
    made["pages_a_layer"] = offsets.shape[1]
    return made
