"""Weights in device memory: each layer in one granule-aligned span, reached through a slot table.

A layer's q, k and v projections are packed into one matrix, its gate and up projections into another. A span is filled
from the checkpoint: its safetensors files stay privately mapped (in the page cache), and filling copies and converts to
the served type. Filling again gives the same bytes. So files of a running worker must not be changed in place;
replacing them by renaming is safe.

Does not decide which layer lends its memory, or when.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from contracts.errors import ConfigError, UpbeatError
from runtime.model_config import ModelConfig, read_json
from worker.core.granules import Owner
from worker.memory.device_memory import DeviceMemory, Span
from worker.memory.tensors import MappedFiles, tensor_at

_ALIGNMENT = 256
#: Old checkpoints contain the rotary embedding's frequencies, which follow from the configuration.
_DERIVED = ".rotary_emb.inv_freq"


class LayerUnloaded(UpbeatError):
    """The layer of a slot is not loaded: it has lent its granules."""


@dataclass(slots=True)
class LayerWeights:
    """One layer's weights: views into its span.

    qkv `[(heads + 2 kv_heads) * head_dim, hidden]`, out `[hidden, heads * head_dim]`, gate_up `[2 * intermediate,
    hidden]`, down `[hidden, intermediate]`; norms and biases are vectors, None where the model has none.
    """

    input_norm: torch.Tensor
    post_norm: torch.Tensor
    qkv: torch.Tensor
    out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    qkv_bias: torch.Tensor | None = None
    out_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None


@dataclass(slots=True)
class TopWeights:
    """Weights outside the layers: embedding and head `[vocab, hidden]` (one tensor when tied), and the last norm."""

    embedding: torch.Tensor
    norm: torch.Tensor
    head: torch.Tensor


class FileState(NamedTuple):
    """Identity and version of a file. A write changes `changed_ns`; a replacement changes `inode`."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, file: Path | int) -> FileState:
        """The state of a path or an open file. Raises OSError."""
        stat = os.stat(file)
        return cls(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


class Checkpoint:
    """The tensors of a directory's safetensors files (one file, or shards with an index), by name, mapped and not
    copied.

    states: of each file when it was opened. taken: names of requested tensors, for `check_all_taken`.
    """

    def __init__(self, directory: Path) -> None:
        """Raises ConfigError when files are missing, damaged, or do not match their index."""
        index = directory / "model.safetensors.index.json"
        single = directory / "model.safetensors"
        where = self._sharded(index) if index.exists() and not single.exists() else None
        self.files = [single] if where is None else [directory / name for name in sorted(set(where.values()))]
        self.tensors: dict[str, torch.Tensor] = {}
        self.states: dict[Path, FileState] = {}
        self.taken: set[str] = set()
        for file in self.files:
            remedy = (
                f"{index.name} names it; download it too"
                if where
                else "give --model a directory with safetensors weights"
            )
            self._open(file, remedy)
        self._mapped = MappedFiles(self.files)
        for name, file_name in (where or {}).items():
            if name not in self.tensors:
                raise ConfigError(
                    f"{directory / file_name} has no tensor {name}, which {index.name} says it has; download both again"
                )

    def _open(self, file: Path, when_missing: str) -> None:
        try:
            state = FileState.of(file)
            with safe_open(file, framework="pt") as opened:
                found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            if FileState.of(file) != state:
                raise ConfigError(f"{file} was changed while it was opened; start again when it is whole")
        except FileNotFoundError:
            raise ConfigError(f"{file} does not exist; {when_missing}") from None
        except (SafetensorError, OSError) as e:
            raise ConfigError(f"{file} is not a readable safetensors file: {e}; download it again") from e
        twice = sorted(found.keys() & self.tensors.keys())
        if twice:
            raise ConfigError(f"{file} has tensor {twice[0]}, which another file has too; download the model again")
        self.tensors |= found
        self.states[file] = state

    def is_unchanged(self) -> bool:
        """Whether the files are those that were opened; False when they were replaced. Raises ConfigError when one was
        written to, as its mapping has changed too."""
        same = True
        for file, state in self.states.items():
            try:
                now = FileState.of(file)
            except OSError:
                same = False
                continue
            if now[:2] == state[:2] and (now.size, now.modified_ns) != (state.size, state.modified_ns):
                raise ConfigError(
                    f"{file} was changed while it was read; start again when it is whole, and replace weights by "
                    "renaming"
                )
            same = same and now == state
        return same

    @staticmethod
    def _sharded(index: Path) -> dict[str, str]:
        where = read_json(index).get("weight_map")
        if not isinstance(where, dict) or not where or not all(isinstance(name, str) for name in where.values()):
            raise ConfigError(f"{index}: weight_map must map tensor names to files; download the model again")
        names = sorted(set(where.values()))
        for name in names:
            if Path(name).name != name:
                raise ConfigError(f"{index}: {name!r} must be a file beside the index")
        return {str(tensor): str(name) for tensor, name in where.items()}

    def forget(self, tensor: torch.Tensor) -> None:
        """Drops the pages of one of these tensors from memory; reading it again loads them."""
        self._mapped.forget(tensor)

    def check_all_taken(self) -> None:
        """Raises ConfigError for a tensor that was not requested: its architecture would differ from ours."""
        extra = sorted(name for name in self.tensors.keys() - self.taken if not name.endswith(_DERIVED))
        if extra:
            more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
            raise ConfigError(
                f"{self.files[0].parent}: the checkpoint has tensor {extra[0]}{more}, which its config.json does "
                "not imply"
            )

    @property
    def bytes(self) -> int:
        """Bytes of all tensors in the checkpoint's types."""
        return sum(t.numel() * t.itemsize for t in self.tensors.values())

    @property
    def dtype(self) -> torch.dtype:
        """The type that holds most of the checkpoint's bytes."""
        sizes: dict[torch.dtype, int] = {}
        for tensor in self.tensors.values():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel() * tensor.itemsize
        return max(sizes, key=lambda d: sizes[d])

    def get(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """The tensor `name`. Raises ConfigError unless it exists with this shape and a floating type."""
        tensor = self.tensors.get(name)
        self.taken.add(name)
        if tensor is None:
            raise ConfigError(
                f"{self.files[0].parent}: the checkpoint has no tensor {name}; it does not fit its config.json"
            )
        if list(tensor.shape) != list(shape) or not tensor.is_floating_point():
            raise ConfigError(
                f"{self.files[0].parent}: tensor {name} is {tensor.dtype} {list(tensor.shape)}, config.json "
                f"implies {list(shape)}"
            )
        return tensor


@dataclass(slots=True)
class _Packed:
    """One tensor of a span: `sources` stacked along their first dimension. forget: called with a source after use."""

    field: str
    shape: list[int]
    sources: list[torch.Tensor]
    forget: Callable[[torch.Tensor], object]


#: pack(field, sources, view): writes a matrix into `view` in the kernels' layout; False: copy it unchanged.
Pack = Callable[[str, Sequence[torch.Tensor], torch.Tensor], bool]


class WeightSpan:
    """Tensors packed into one span: laid out once, filled from the checkpoint as often as needed."""

    def __init__(
        self, memory: DeviceMemory, owner: Owner, parts: list[_Packed], dtype: torch.dtype, pack: Pack | None = None
    ) -> None:
        self.memory = memory
        self._pack = pack
        self._parts = parts
        self._dtype = dtype
        self._offsets: list[int] = []
        end = 0
        for part in parts:
            self._offsets.append(end)
            end += -(-math.prod(part.shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        self.span: Span = memory.reserve(end, owner)
        self.loaded = False

    @property
    def bytes(self) -> int:
        """Physical bytes when loaded: whole granules."""
        return self.span.bytes

    def load(self) -> dict[str, torch.Tensor]:
        """Takes granules, fills them from the checkpoint and returns views by field. Raises OutOfGranules, changing
        nothing."""
        if not self.loaded:
            self.span.map(0, self.memory.take(self.span.granules, self.span.owner))
            self.loaded = True
        views = {}
        for part, offset in zip(self._parts, self._offsets, strict=True):
            view = tensor_at(self.span.address + offset, self._dtype, part.shape, self.memory.device)
            if self._pack is None or not self._pack(part.field, part.sources, view):
                for place, source in zip(
                    torch.split(view, [len(source) for source in part.sources]), part.sources, strict=True
                ):
                    place.copy_(source)
            for source in part.sources:
                part.forget(source)
            views[part.field] = view
        return views

    def unload(self) -> int:
        """Gives the granules back; returns their number. Views become invalid."""
        if not self.loaded:
            return 0
        granules = self.span.unmap(0, self.span.granules)
        self.memory.give(granules)
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
            self._slots[layer] = LayerWeights(**self._spans[layer].load())

    def unload_layer(self, layer: int) -> int:
        """Clears the slot and gives the layer's granules back; returns their number. The layer must not be in use."""
        self._slots[layer] = None
        return self._spans[layer].unload()


def layer_parts(checkpoint: Checkpoint, config: ModelConfig, layer: int) -> list[_Packed]:
    """The packed tensors of one layer, with the field names of LayerWeights."""
    prefix, c = f"model.layers.{layer}.", config
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim

    def pack(field: str, names: dict[str, int], *width: int) -> _Packed:
        sources = [checkpoint.get(prefix + name, [rows, *width]) for name, rows in names.items()]
        return _Packed(field, [sum(names.values()), *width], sources, checkpoint.forget)

    projections = {f"self_attn.{name}_proj": rows for name, rows in (("q", q), ("k", kv), ("v", kv))}
    mlp = {"mlp.gate_proj": c.intermediate_size, "mlp.up_proj": c.intermediate_size}
    parts = [
        pack("input_norm", {"input_layernorm.weight": c.hidden_size}),
        pack("post_norm", {"post_attention_layernorm.weight": c.hidden_size}),
        pack("qkv", _suffixed(projections, "weight"), c.hidden_size),
        pack("out", {"self_attn.o_proj.weight": c.hidden_size}, q),
        pack("gate_up", _suffixed(mlp, "weight"), c.hidden_size),
        pack("down", {"mlp.down_proj.weight": c.hidden_size}, c.intermediate_size),
    ]
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
    assert {p.field for p in parts} <= {f.name for f in fields(LayerWeights)}
    return parts


def top_parts(checkpoint: Checkpoint, config: ModelConfig) -> list[_Packed]:
    """The packed tensors outside the layers; without `head` when it is the embedding."""
    table = [config.vocab_size, config.hidden_size]

    def plain(field: str, name: str, shape: list[int]) -> _Packed:
        return _Packed(field, shape, [checkpoint.get(name, shape)], checkpoint.forget)

    parts = [
        plain("embedding", "model.embed_tokens.weight", table),
        plain("norm", "model.norm.weight", [config.hidden_size]),
    ]
    if not config.tied:
        parts.append(plain("head", "lm_head.weight", table))
    elif "lm_head.weight" in checkpoint.tensors:
        checkpoint.get("lm_head.weight", table)  # a repeated embedding; marked as taken, not used
    return parts


def _suffixed(names: dict[str, int], suffix: str) -> dict[str, int]:
    return {f"{name}.{suffix}": rows for name, rows in names.items()}
