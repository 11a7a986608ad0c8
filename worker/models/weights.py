"""Weights in device memory: each layer in one granule-aligned span, reached through a slot table.

A layer's q, k and v projections are packed into one matrix, its gate and up projections into another. A span is filled
from the checkpoint, which is packed and converted to the served type, or from a host image of these bytes
(`worker.models.image`). Filling again gives the same bytes.

Does not decide which layer lends its memory, or when.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from contracts.errors import UpbeatError
from runtime.model_config import ModelConfig
from runtime.model_experts import Experts
from worker.core.granules import Owner
from worker.memory.device_memory import DeviceMemory, Span
from worker.memory.tensors import tensor_at
from worker.models.checkpoint import Checkpoint
from worker.models.quantised import Matrix, QuantisedPart
from worker.models.quantised_formats import quantised_part, refuse_quantised_top

_ALIGNMENT = 256


class LayerUnloaded(UpbeatError):
    """The layer of a slot is not loaded: it has lent its granules."""


@dataclass(slots=True)
class LayerWeights:
    """One layer's weights: views into its span.

    qkv `[(heads + 2 kv_heads) * head_dim, hidden]`, out `[hidden, heads * head_dim]`, gate_up `[2 * intermediate,
    hidden]`, down `[hidden, intermediate]`, each perhaps in few bits; norms and biases are vectors, None where the
    model has none. In a layer with experts, router is `[experts, hidden]`, and gate_up and down have those of all
    experts, one after the other.
    attended_norm and mlp_norm follow attention's and the MLP's last product, where the model has them.
    The fields that end in _a and _b are matrices of LoRA adapters (`worker.models.adapters`).
    """

    input_norm: torch.Tensor
    post_norm: torch.Tensor
    qkv: Matrix
    out: Matrix
    gate_up: Matrix
    down: Matrix
    qkv_bias: torch.Tensor | None = None
    out_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    router: torch.Tensor | None = None
    attended_norm: torch.Tensor | None = None
    mlp_norm: torch.Tensor | None = None
    qkv_a: torch.Tensor | None = None
    qkv_b: torch.Tensor | None = None
    out_a: torch.Tensor | None = None
    out_b: torch.Tensor | None = None
    gate_up_a: torch.Tensor | None = None
    gate_up_b: torch.Tensor | None = None
    down_a: torch.Tensor | None = None
    down_b: torch.Tensor | None = None


@dataclass(slots=True)
class TopWeights:
    """Weights outside the layers: embedding and head `[vocab, hidden]` (one tensor when tied), and the last norm."""

    embedding: torch.Tensor
    norm: torch.Tensor
    head: torch.Tensor


@dataclass(slots=True)
class Packed:
    """One tensor of a span: `sources` stacked along their first dimension. forget: called with a source after use.
    made: makes the only source instead, whenever the tensor is packed."""

    field: str
    shape: list[int]
    sources: list[torch.Tensor]
    forget: Callable[[torch.Tensor], object]
    made: Callable[[], torch.Tensor] | None = None

    def bytes(self, dtype: torch.dtype) -> int:
        """Of the tensor in the model's type."""
        return math.prod(self.shape) * dtype.itemsize

    def view_at(self, address: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The tensor, where its bytes lie at this address."""
        return tensor_at(address, dtype, self.shape, device)

    def pack_into(self, view: torch.Tensor, pack: Pack | None) -> None:
        """Writes the tensor from the checkpoint into `view`."""
        sources = self.sources if self.made is None else [self.made()]
        if pack is None or not pack(self.field, sources, view):
            for place, source in zip(torch.split(view, [len(source) for source in sources]), sources, strict=True):
                place.copy_(source)
        for source in sources:
            self.forget(source)


#: pack(field, sources, view): writes a matrix into `view` in the kernels' layout; False: copy it unchanged.
Pack = Callable[[str, Sequence[torch.Tensor], torch.Tensor], bool]
#: One tensor or matrix of a span.
Part = Packed | QuantisedPart


class Layout:
    """Tensors packed one after the other. bytes: of them, a multiple of 256. pack: lays out matrices for kernels; None:
    all are plain."""

    def __init__(self, parts: Sequence[Part], dtype: torch.dtype, pack: Pack | None = None) -> None:
        self._pack, self._parts, self._dtype = pack, parts, dtype
        self._offsets: list[int] = []
        self.bytes = 0
        for part in parts:
            self._offsets.append(self.bytes)
            self.bytes += -(-part.bytes(dtype) // _ALIGNMENT) * _ALIGNMENT

    def views_at(self, address: int, device: torch.device) -> dict[str, Any]:
        """The tensors by field, where their bytes lie at this address; of a part in few bits, its `QuantisedMatrix`."""
        return {
            part.field: part.view_at(address + offset, self._dtype, device)
            for part, offset in zip(self._parts, self._offsets, strict=True)
        }

    def pack_into(self, views: dict[str, Any]) -> None:
        """Writes the tensors from the checkpoint into `views`. Any thread."""
        for part in self._parts:
            part.pack_into(views[part.field], self._pack)


class WeightSpan:
    """Tensors packed into one span: laid out once, filled as often as needed, always with the same bytes.

    views: the tensors by field; valid while the span is loaded.
    """

    def __init__(
        self, memory: DeviceMemory, owner: Owner, parts: Sequence[Part], dtype: torch.dtype, pack: Pack | None = None
    ) -> None:
        self.memory = memory
        self._layout = Layout(parts, dtype, pack)
        #: Bytes of its tensors, a multiple of 256.
        self.packed_bytes = self._layout.bytes
        self.span: Span = memory.reserve(self.packed_bytes, owner)
        self.views = self.views_at(self.span.address)
        self.loaded = False

    @property
    def bytes(self) -> int:
        """Physical bytes when loaded: whole granules."""
        return self.span.bytes

    def load(self) -> dict[str, Any]:
        """Takes granules, fills them from the checkpoint and returns `views`. Raises OutOfGranules, changing
        nothing."""
        self.take()
        self.span.show(0, self.span.granules)
        self.pack_into(self.views)
        return self.views

    def take(self) -> None:
        """Takes granules; they are mapped and filled by somebody else (`worker.models.filling`). Raises OutOfGranules,
        changing nothing."""
        if not self.loaded:
            self.span.assign(0, self.memory.take(self.span.granules, self.span.owner))
            self.loaded = True

    def give_up(self) -> list[int]:
        """Takes its granules away, for another place: they are held. The range is unmapped a little later; no queued
        work may use it. Views become invalid."""
        self.loaded = False
        return self.span.retire(0, self.span.granules)

    def occupy(self, granules: Sequence[int]) -> None:
        """Puts held granules in its place; somebody else maps and fills them."""
        self.span.assign(0, granules)
        self.loaded = True

    def views_at(self, address: int) -> dict[str, Any]:
        """Its tensors by field, where its bytes lie at another address of the device."""
        return self._layout.views_at(address, self.memory.device)

    def pack_at(self, address: int) -> None:
        """Writes the packed bytes from the checkpoint to host memory. Any thread."""
        self.pack_into(self._layout.views_at(address, torch.device("cpu")))

    def pack_into(self, views: dict[str, Any]) -> None:
        """Writes the tensors from the checkpoint into `views`, in the kernels' layout. Any thread."""
        self._layout.pack_into(views)

    def unload(self, *, keep: bool = False) -> int:
        """Gives the granules back; returns their number. Views become invalid. keep: their memory stays allocated, and
        the range is unmapped a little later."""
        if not self.loaded:
            return 0
        leave = self.span.retire if keep else self.span.unmap
        granules = leave(0, self.span.granules)
        self.memory.give(granules, keep=keep)
        self.loaded = False
        return len(granules)


class SlotTable:
    """The layers' weights by number. Reading an unloaded slot raises LayerUnloaded.

    before_use, after_use: called with a layer's number before and after a step uses it, on the thread that runs steps.
    before_use may load the layer or wait for it (MIRAGE, section 5: layers that share memory take turns). When
    after_use is called, launched kernels may still run. If a step fails, after_use is not called.
    """

    def __init__(self, spans: list[WeightSpan]) -> None:
        self._spans = spans
        self._slots: list[LayerWeights | None] = [None] * len(spans)
        self.before_use: Callable[[int], object] = lambda layer: None
        self.after_use: Callable[[int], object] = lambda layer: None

    def acquire(self, layer: int) -> LayerWeights:
        """The weights of a layer that the step uses next. Raises LayerUnloaded."""
        self.before_use(layer)
        return self[layer]

    def computed(self, layer: int) -> None:
        """Call after the step has used the layer's weights, or has launched the kernels that do."""
        self.after_use(layer)

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[LayerWeights]:
        return (self[layer] for layer in range(len(self)))

    def __getitem__(self, layer: int) -> LayerWeights:
        weights = self._slots[layer]
        if weights is None:
            raise LayerUnloaded(f"layer {layer} has lent its granules; load_layer({layer}) comes first")
        return weights

    def is_loaded(self, layer: int) -> bool:
        """Whether `layer` is loaded."""
        return self._slots[layer] is not None

    def layer_granules(self, layer: int) -> int:
        """Number of granules of `layer` when loaded."""
        return self._spans[layer].span.granules

    def load_layer(self, layer: int) -> None:
        """Fills the layer's span and sets its slot; no effect when loaded. Raises OutOfGranules, changing nothing, when
        too few are free."""
        if self._slots[layer] is None:
            self._spans[layer].load()
            self.fill_slot(layer)

    def fill_slot(self, layer: int) -> None:
        """The layer's span has been filled, or will be when `before_use` returns: sets its slot."""
        self._slots[layer] = LayerWeights(**self._spans[layer].views)

    def put(self, layer: int, weights: LayerWeights) -> None:
        """The layer's weights will be there when `before_use` returns."""
        self._slots[layer] = weights

    def unload_layer(self, layer: int, *, keep: bool = False) -> int:
        """Clears the slot and gives the layer's granules back; returns their number. The layer must not be in use.
        keep: see `WeightSpan.unload`."""
        self._slots[layer] = None
        return self._spans[layer].unload(keep=keep)


def layer_parts(checkpoint: Checkpoint, config: ModelConfig, layer: int) -> list[Part]:
    """The packed tensors of one layer, with the field names of LayerWeights."""
    prefix, c = f"model.layers.{layer}.", config
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim

    def pack(field: str, names: dict[str, int], *width: int) -> Packed:
        sources = [checkpoint.get(prefix + name, [rows, *width]) for name, rows in names.items()]
        return Packed(field, [sum(names.values()), *width], sources, checkpoint.forget)

    def stacked(field: str, sources: Sequence[torch.Tensor], width: int) -> Packed:
        return Packed(field, [sum(map(len, sources)), width], list(sources), checkpoint.forget)

    def matrix(field: str, modules: dict[str, int], width: int, biased: bool) -> Part:
        if c.quantisation is not None:
            named = {prefix + name: rows for name, rows in modules.items()}
            if part := quantised_part(checkpoint, c.quantisation, field, named, width, biased):
                return part
        return pack(field, _suffixed(modules, "weight"), width)

    projections = {f"self_attn.{name}_proj": rows for name, rows in (("q", q), ("k", kv), ("v", kv))}
    mlp = {"mlp.gate_proj": c.intermediate_size, "mlp.up_proj": c.intermediate_size}
    before_mlp = "pre_feedforward" if c.gemma else "post_attention"
    parts: list[Part] = [
        pack("input_norm", {"input_layernorm.weight": c.hidden_size}),
        pack("post_norm", {f"{before_mlp}_layernorm.weight": c.hidden_size}),
        matrix("qkv", projections, c.hidden_size, c.qkv_bias),
        matrix("out", {"self_attn.o_proj": c.hidden_size}, q, c.out_bias),
    ]
    if c.experts is not None and c.has_experts(layer):
        gate_up, down = expert_matrices(checkpoint, prefix + "mlp.experts", c.experts, c.hidden_size)
        parts.append(stacked("gate_up", gate_up, c.hidden_size))
        parts.append(stacked("down", down, c.experts.size))
        parts.append(pack("router", {"mlp.gate.weight": c.experts.count}, c.hidden_size))
    else:
        parts.append(matrix("gate_up", mlp, c.hidden_size, c.mlp_bias))
        parts.append(matrix("down", {"mlp.down_proj": c.hidden_size}, c.intermediate_size, c.mlp_bias))
    if c.qkv_bias:
        parts.append(pack("qkv_bias", _suffixed(projections, "bias")))
    if c.out_bias:
        parts.append(pack("out_bias", {"self_attn.o_proj.bias": c.hidden_size}))
    if c.mlp_bias:
        parts.append(pack("gate_up_bias", _suffixed(mlp, "bias")))
        parts.append(pack("down_bias", {"mlp.down_proj.bias": c.hidden_size}))
    if c.qk_norm:
        parts.append(pack("q_norm", {"self_attn.q_norm.weight": c.head_dim}))
        parts.append(pack("k_norm", {"self_attn.k_norm.weight": c.head_dim}))
    if c.gemma is not None:
        parts.append(pack("attended_norm", {"post_attention_layernorm.weight": c.hidden_size}))
        parts.append(pack("mlp_norm", {"post_feedforward_layernorm.weight": c.hidden_size}))
    assert {p.field for p in parts} <= {f.name for f in fields(LayerWeights)}
    return parts


def expert_matrices(
    checkpoint: Checkpoint, prefix: str, e: Experts, hidden: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Gate and up projections `[size, hidden]` of each expert in turn, and their down projections `[hidden, size]`.

    A checkpoint has each matrix by itself, or two tensors with those of all experts (transformers 5). Raises
    ConfigError.
    """
    if f"{prefix}.gate_up_proj" in checkpoint.tensors:
        both = checkpoint.get(f"{prefix}.gate_up_proj", [e.count, 2 * e.size, hidden])
        down = checkpoint.get(f"{prefix}.down_proj", [e.count, hidden, e.size])
        return [matrix for expert in both for matrix in expert.split(e.size)], list(down)
    gate_up, downs = list[torch.Tensor](), list[torch.Tensor]()
    for expert in range(e.count):
        gate_up += [checkpoint.get(f"{prefix}.{expert}.{n}_proj.weight", [e.size, hidden]) for n in ("gate", "up")]
        downs.append(checkpoint.get(f"{prefix}.{expert}.down_proj.weight", [hidden, e.size]))
    return gate_up, downs


def top_parts(checkpoint: Checkpoint, config: ModelConfig) -> list[Packed]:
    """The packed tensors outside the layers; without `head` when it is the embedding."""
    if config.quantisation is not None:
        refuse_quantised_top(checkpoint)
    table = [config.vocab_size, config.hidden_size]

    def plain(field: str, name: str, shape: list[int]) -> Packed:
        return Packed(field, shape, [checkpoint.get(name, shape)], checkpoint.forget)

    parts = [
        plain("embedding", "model.embed_tokens.weight", table),
        plain("norm", "model.norm.weight", [config.hidden_size]),
    ]
    if not config.tied:
        parts.append(plain("head", "lm_head.weight", table))
    elif checkpoint.has("lm_head.weight"):
        checkpoint.get("lm_head.weight", table)  # a repeated embedding; marked as taken, not used
    return parts


def _suffixed(names: dict[str, int], suffix: str) -> dict[str, int]:
    return {f"{name}.{suffix}": rows for name, rows in names.items()}
