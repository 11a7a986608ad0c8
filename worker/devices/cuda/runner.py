"""One engine step on a CUDA device: Triton kernels that read pages in place, the library's matrix products, and one
graph per layer for decode.

A step of single tokens that all want logits (decode) is padded to a power of two of rows and replays one graph per
layer, captured when its shape occurs the second time. Other steps launch kernel by kernel. A graph contains the
addresses of its layer's weights, and is captured again when the layer's slot has others. A span that lent its granules
and has them back keeps its addresses.

By default a row's attention does not depend on its batch, but its matrix products may, as the library changes the order
of sums with the number of rows. With `batch_invariant`, decode and prefill use the same kernels with the same tiles for
every row, like `worker.devices.cpu.native_runner` on the CPU.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
import torch

from worker.devices.cuda.experts import ExpertsMemory
from worker.devices.cuda.queue import Captured, Queue
from worker.devices.cuda.tables import PageTables, StepInputs
from worker.devices.runner import Slice, check
from worker.kernels.cuda.attention import SPLIT_TOKENS, AttentionShape, attend, attend_split
from worker.kernels.cuda.low_rank import add_low_rank
from worker.kernels.cuda.products import multiply
from worker.kernels.cuda.rows import add_norm, gate_mul, rotate_write
from worker.memory.copier import Fence
from worker.memory.paged_kv import PagedKv
from worker.models.adapters import MOST_SEGMENTS
from worker.models.llama import embedding_scale
from worker.models.load import Model
from worker.models.quantised import Matrix
from worker.models.weights import LayerWeights

#: Shapes of decode steps whose graphs are kept.
_MOST_GRAPHS = 32


@dataclass(slots=True)
class _Work:
    """The inputs of a step's layers, on the device. Arrays as described in `worker.kernels.cuda.attention`.

    tokens: rows of the step, with padding. many: blocks of slices of several tokens; singles: of one token; splits:
    parts of the longest single. lasts: rows of x that the last layer finishes; None: all.
    adapters, last_adapters: each row's LoRA adapter; None: no row has one.
    """

    tokens: int
    ids: torch.Tensor
    places: torch.Tensor
    slices: torch.Tensor
    many: torch.Tensor
    singles: torch.Tensor
    splits: int
    lasts: torch.Tensor | None = None
    last_slices: torch.Tensor | None = None
    last_blocks: torch.Tensor | None = None
    last_splits: int = 1
    adapters: torch.Tensor | None = None
    last_adapters: torch.Tensor | None = None


#: A layer's graphs by the addresses of its weights: its own place, and slots that it shares.
_Graphs = dict[tuple[int, tuple[int, ...]], Captured]


class _Activations:
    """Memory of a step's activations for `tokens` rows, in the model's type."""

    def __init__(self, model: Model, tokens: int, device: torch.device) -> None:
        c, self.tokens = model.config, tokens

        def rows(width: int) -> torch.Tensor:
            return torch.empty(tokens, width, dtype=model.dtype, device=device)

        self.x, self.kept, self.delta, self.normed = (
            rows(c.hidden_size),
            rows(c.hidden_size),
            rows(c.hidden_size),
            rows(c.hidden_size),
        )
        self.packed = rows((c.heads + 2 * c.kv_heads) * c.head_dim)
        self.q, self.attended = rows(c.heads * c.head_dim), rows(c.heads * c.head_dim)
        dense = 0 if c.experts and all(c.experts.layers) else c.intermediate_size
        self.gate_up, self.mid = rows(2 * dense), rows(dense)
        width = MOST_SEGMENTS * model.adapters.rank
        self.low = torch.empty(tokens * width, dtype=torch.float32, device=device)
        sizes = c.hidden_size, tokens, model.dtype, device
        self.experts = ExpertsMemory(c.experts, *sizes) if c.experts else None
        own = (self.x, self.kept, self.delta, self.normed, self.packed, self.q, self.attended, self.gate_up, self.mid)
        self.bytes = _bytes(*own, self.low, *(self.experts.tensors() if self.experts else ()))


class CudaRunner:
    """Like `worker.devices.runner.Runner`, on `queue`'s device. Keeps activations, page tables and graphs between
    steps.

    fence: orders compute after running copies. most_tokens, most_sequences: expected maximum of a step; larger steps
    grow the memory.
    """

    def __init__(
        self,
        model: Model,
        kv: PagedKv,
        queue: Queue,
        fence: Fence,
        most_tokens: int,
        most_sequences: int,
        batch_invariant: bool = False,
    ) -> None:
        c = model.config
        self.model, self.kv, self.queue, self.fence, self.batch_invariant = model, kv, queue, fence, batch_invariant
        heads = c.heads, c.kv_heads, c.head_dim
        self._shape = AttentionShape(*heads, kv.shape.chunk_tokens, model.dtype, c.attention_scale)
        self._prefill, self._decode = self._shape.tiles(prefill=True), self._shape.tiles(prefill=False)
        self._gemma, self._scale = c.gemma is not None, embedding_scale(c, model.dtype)
        at, half = torch.arange(model.max_tokens), c.head_dim // 2
        #: cos and sin by rotary table.
        self._turns = {
            rope: [t[:, 0, half:].contiguous().to(queue.device) for t in rope.at(at, model.max_tokens)]
            for rope in model.ropes()
        }
        #: Graphs by layer, by a decode step's shape (rows, parts, adapters); None: seen once. Oldest use first.
        self.graphs: collections.OrderedDict[tuple[int, int, bool], _Graphs | None] = collections.OrderedDict()
        self._parts = self._stats = torch.empty(0, device=queue.device)
        self._make_room(most_tokens, most_sequences)

    @torch.inference_mode()
    def step(
        self, slices: list[Slice], before_layer: Callable[[int], None], after_layer: Callable[[int], None]
    ) -> torch.Tensor:
        """See `Runner.step`. `before_layer(l)` precedes all of layer l. `after_layer(l)` follows its launch; copies
        that the copier starts later are ordered after it."""
        check(slices, self.kv, self.model)
        if not slices:
            return torch.empty(0, self.model.config.vocab_size)
        try:
            with self.queue.computing():
                return self._step(slices, before_layer, after_layer)
        except BaseException:
            self.queue.finish()  # queued work still writes to pages, which the caller may reuse after the error
            raise

    def _step(
        self, slices: list[Slice], before_layer: Callable[[int], None], after_layer: Callable[[int], None]
    ) -> torch.Tensor:
        model, layers = self.model, self.model.config.layers
        wanted = sum(s.want_logits for s in slices)
        decodes = wanted == len(slices) and all(len(s.tokens) == 1 for s in slices)
        rows = 1 << (len(slices) - 1).bit_length() if decodes else len(slices)
        self._fit(rows if decodes else sum(len(s.tokens) for s in slices), rows)
        self._tables.show(slices)
        work = self._decode_work(slices, rows) if decodes else self._mixed_work(slices)
        graphs = self._graphs_of(work) if decodes else None
        a = self._activations
        torch.index_select(model.top.embedding, 0, work.ids, out=a.x[: work.tokens])
        if self._scale != 1.0:
            a.x[: work.tokens].mul_(self._scale)
        for layer in range(layers):
            before_layer(layer)
            if self.fence.pending:
                self.fence.wait_for(np.concatenate([s.pages[layer] for s in slices]))
            weights = model.layers.acquire(layer)
            if graphs is None:
                self._layer(layer, weights, work)
            else:
                self._replay(graphs, layer, weights, work)
            model.layers.computed(layer)
            self.fence.written()
            after_layer(layer)
        return self._logits(wanted, a.kept if work.lasts is not None else a.x)

    # ---- memory beside granules ---------------------------------------------------------------------------------
    def activation_bytes(self) -> int:
        """Device memory of activations. Any thread."""
        return self._activations.bytes + _bytes(self._parts, self._stats)

    def table_bytes(self) -> int:
        """Device memory of page tables, inputs and rotary tables. Any thread."""
        return _bytes(self._tables.on_device, self._inputs.on_device, *itertools.chain(*self._turns.values()))

    def graph_bytes(self) -> int:
        """Device memory of graphs, as measured at their capture. Any thread."""
        return sum(graph.bytes for shape in list(self.graphs.values()) for graph in list((shape or {}).values()))

    # ---- what a step computes ----------------------------------------------------------------------------------
    def _decode_work(self, slices: list[Slice], rows: int) -> _Work:
        """One row per slice, padded to `rows`."""
        n = len(slices)
        ids, places, table = np.zeros(rows, np.int32), np.zeros((rows, 2), np.int32), np.zeros((rows, 4), np.int32)
        places[:, 0], places[:, 1] = -1, np.arange(rows)
        table[:, 0] = table[:, 3] = np.arange(rows)
        ids[:n] = [s.tokens[0] for s in slices]
        places[:n, 0] = table[:n, 2] = [s.start for s in slices]
        table[:n, 1] = 1
        each, none = np.stack((np.arange(rows), np.zeros(rows)), axis=1), np.zeros((0, 2))
        splits = 1 if self.batch_invariant else _splits(max(s.start for s in slices))
        many, singles = (each, none) if self.batch_invariant else (none, each)
        numbers = np.array([s.adapter for s in slices] + [-1] * (rows - n))
        adapted = [numbers] if numbers.max() >= 0 else []
        inputs = self._inputs.upload([ids, places, table, many, singles, *adapted])
        work = _Work(rows, inputs[0], inputs[1], inputs[2], inputs[3], inputs[4], splits)
        work.adapters = inputs[5] if adapted else None
        return work

    def _mixed_work(self, slices: list[Slice]) -> _Work:
        counts, starts = (np.array(v) for v in zip(*((len(s.tokens), s.start) for s in slices), strict=True))
        rows = np.cumsum(counts) - counts
        ids = np.array([t for s in slices for t in s.tokens])
        positions = np.concatenate(
            [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
        )
        places = np.stack((positions, np.repeat(np.arange(len(slices)), counts)), axis=1)
        table = np.stack((rows, counts, starts, rows), axis=1)
        wanted = np.flatnonzero([s.want_logits for s in slices])
        lasts = (rows + counts - 1)[wanted]
        last_table = np.zeros_like(table)
        last_table[wanted] = np.stack(
            (lasts, np.ones_like(lasts), (starts + counts - 1)[wanted], np.arange(len(wanted))), axis=1
        )
        one = np.flatnonzero(counts == 1)
        last_blocks, singles = (np.stack((which, np.zeros_like(which)), axis=1) for which in (wanted, one))
        each, least = self._prefill.rows // self._shape.group, 1 if self.batch_invariant else 2
        many = [(i, first) for i, count in enumerate(counts) if count >= least for first in range(0, count, each)]
        if self.batch_invariant:
            singles = singles[:0]
        arrays = [ids, places, table, np.array(many, np.int32).reshape(-1, 2), singles, lasts, last_table, last_blocks]
        if adapted := (numbers := np.array([s.adapter for s in slices])).max() >= 0:
            arrays += [np.repeat(numbers, counts), numbers[wanted]]
        on_device = self._inputs.upload(arrays)
        splits = _splits(int(starts[one].max())) if len(singles) else 1
        last_splits = 1 if self.batch_invariant else _splits(int((starts + counts - 1).max()))
        inputs = on_device[0], on_device[1], on_device[2], on_device[3], on_device[4]
        work = _Work(len(ids), *inputs, splits, on_device[5], on_device[6], on_device[7], last_splits)
        if adapted:
            work.adapters, work.last_adapters = on_device[8:]
        return work

    def _layer(self, layer: int, w: LayerWeights, work: _Work) -> None:
        c, a, n = self.model.config, self._activations, work.tokens
        add_norm(a.x[:n], a.delta[:n] if layer else None, w.input_norm, c.norm_eps, a.normed[:n], self._gemma)
        self._project("qkv", w, a.normed[:n], a.packed[:n], work.adapters)
        norms = None if w.q_norm is None or w.k_norm is None else (w.q_norm, w.k_norm)
        table = self._tables.on_device[layer]
        heads = c.heads, c.kv_heads, self.kv.shape.chunk_tokens
        cos, sin = self._turns[self.model.rope_of(layer)]
        rotate_write(a.packed[:n], a.q[:n], cos, sin, norms, c.norm_eps, table, work.places, *heads, self._gemma)
        window, x = c.windows[layer], a.x
        places: torch.Tensor | None = work.places
        adapters = work.adapters
        if (
            layer == c.layers - 1
            and work.lasts is not None
            and work.last_slices is not None
            and work.last_blocks is not None
        ):
            # The last layer computes what the logits need and nothing else: the last tokens.
            self._attend(layer, work.last_slices, work.last_blocks, work.last_splits, window)
            x, n, places, adapters = a.kept, work.lasts.shape[0], None, work.last_adapters
            torch.index_select(a.x, 0, work.lasts, out=x[:n])
        else:
            if work.many.shape[0]:
                attend(self._shape, self._prefill, a.q, a.attended, table, work.slices, work.many, window)
            self._attend(layer, work.slices, work.singles, work.splits, window)
        if n:
            self._finish_layer(w, x[:n], n, places, adapters)

    def _attend(self, layer: int, slices: torch.Tensor, blocks: torch.Tensor, splits: int, window: int | None) -> None:
        """Attention of single tokens."""
        a, table = self._activations, self._tables.on_device[layer]
        if not blocks.shape[0]:
            return
        if self.batch_invariant:
            attend(self._shape, self._prefill, a.q, a.attended, table, slices, blocks, window)
            return
        parts, stats = self._scratch(blocks.shape[0], splits)
        attend_split(self._shape, self._decode, a.q, a.attended, table, slices, blocks, window, parts, stats)

    def _finish_layer(
        self, w: LayerWeights, x: torch.Tensor, n: int, places: torch.Tensor | None, adapters: torch.Tensor | None
    ) -> None:
        a, eps = self._activations, self.model.config.norm_eps
        self._project("out", w, a.attended[:n], a.delta[:n], adapters)
        self._norm_delta(w.attended_norm, n)
        add_norm(x, a.delta[:n], w.post_norm, eps, a.normed[:n], self._gemma)
        if w.router is not None and a.experts is not None:
            rows = a.normed[:n], a.delta[:n], places
            a.experts.mix(w, w.router, *rows, self._product, self.batch_invariant)
            return
        self._project("gate_up", w, a.normed[:n], a.gate_up[:n], adapters)
        gate_mul(a.gate_up[:n], a.mid[:n], self._gemma)
        self._project("down", w, a.mid[:n], a.delta[:n], adapters)
        self._norm_delta(w.mlp_norm, n)

    def _norm_delta(self, weight: torch.Tensor | None, n: int) -> None:
        """The norm that follows a product, where the model has one."""
        if weight is not None:
            delta = self._activations.delta[:n]
            add_norm(delta, None, weight, self.model.config.norm_eps, delta, self._gemma)

    def _project(
        self, product: str, w: LayerWeights, x: torch.Tensor, out: torch.Tensor, numbers: torch.Tensor | None
    ) -> None:
        """A product of a layer, and the rows' low-rank ones, if the step has some and the adapters change it."""
        self._product(x, getattr(w, product), getattr(w, f"{product}_bias"), out)
        a: torch.Tensor | None = getattr(w, f"{product}_a")
        b: torch.Tensor | None = getattr(w, f"{product}_b")
        if numbers is not None and a is not None and b is not None:
            add_low_rank(x, a, b, numbers, out, self._activations.low, self.model.adapters.segments(product))

    def _product(self, x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        multiply(x, weight, bias, out, self.batch_invariant)

    def _logits(self, count: int, x: torch.Tensor) -> torch.Tensor:
        top, a, vocabulary = self.model.top, self._activations, self.model.config.vocab_size
        host = self.queue.host(count, vocabulary, dtype=torch.float32)
        if count:
            add_norm(x[:count], a.delta[:count], top.norm, self.model.config.norm_eps, a.normed[:count], self._gemma)
            out = torch.empty(count, vocabulary, dtype=self.model.dtype, device=self.queue.device)
            self._product(a.normed[:count], top.head, None, out)
            host.copy_(out.float(), non_blocking=True)
        self.queue.finish()
        return host

    # ---- graphs and memory -------------------------------------------------------------------------------------
    def _graphs_of(self, work: _Work) -> _Graphs | None:
        """The graphs for steps of this shape, filled layer by layer; None the first time, when kernels are compiled."""
        key = work.tokens, work.splits, work.adapters is not None
        self._scratch(work.tokens, work.splits)  # before the look-up: growing it drops all graphs
        known = key in self.graphs
        found = self.graphs.pop(key, None)
        self.graphs[key] = {} if known and found is None else found
        while len(self.graphs) > _MOST_GRAPHS:
            self.graphs.popitem(last=False)
        return self.graphs[key]

    def _replay(self, graphs: _Graphs, layer: int, weights: LayerWeights, work: _Work) -> None:
        addresses = _addresses(weights)
        graph = graphs.get((layer, addresses))
        if graph is None:
            graph = graphs[layer, addresses] = self.queue.capture(lambda: self._layer(layer, weights, work))
        graph.replay()

    def _scratch(self, blocks: int, splits: int) -> tuple[torch.Tensor, torch.Tensor]:
        c = self.model.config
        need = blocks * c.heads * splits
        if self._stats.numel() < 2 * need:
            self.queue.finish()
            self.graphs.clear()
            need_up = 1 << (need - 1).bit_length()
            self._parts, self._stats = (
                torch.empty(need_up * width, device=self.queue.device) for width in (c.head_dim, 2)
            )
        shape = (blocks, c.heads, splits)
        return self._parts[: need * c.head_dim].view(*shape, c.head_dim), self._stats[: 2 * need].view(*shape, 2)

    def _fit(self, tokens: int, sequences: int) -> None:
        """Grows memory, if needed, for steps of `tokens` and `sequences`."""
        if tokens > self._activations.tokens or sequences > self._tables.rows:
            self._make_room(max(tokens, self._activations.tokens), max(sequences, self._tables.rows))

    def _make_room(self, tokens: int, sequences: int) -> None:
        """Reallocates memory and drops all graphs, which contain addresses."""
        self.queue.finish()
        self.graphs.clear()
        self._activations = _Activations(self.model, tokens, self.queue.device)
        self._tables = PageTables(
            self.kv, self.queue, sequences, -(-self.model.max_tokens // self.kv.shape.chunk_tokens)
        )
        self._inputs = StepInputs(self.queue, 9 * tokens + 28 * sequences + 80)


def _bytes(*tensors: torch.Tensor) -> int:
    return sum(t.numel() * t.itemsize for t in tensors)


def _splits(position: int) -> int:
    """Number of parts of the keys of a token at `position`, rounded up to a power of two to limit shapes of graphs."""
    return 1 << (position // SPLIT_TOKENS).bit_length()


def _addresses(w: LayerWeights) -> tuple[int, ...]:
    every = (getattr(w, field.name) for field in fields(LayerWeights))
    return tuple(t.data_ptr() for t in every if t is not None)
