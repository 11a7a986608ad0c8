"""LoRA adapters beside a model's weights: each layer's span also has all adapters' matrices.

So they are counted, loaded, copied from images, lent and given up with the layer. All adapters of a model have the same
place: padded with zeros to the largest rank, and to all projections that one of them has. `scale` is in B already.

For a product with weights `[outputs, inputs]` of S projections (q, k and v; gate and up), with N adapters of rank R:
A `[N, S * R, inputs]` has the rows of projection s from s * R on, B `[N, outputs, R]` has the rows of all projections.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open

from contracts.errors import ConfigError
from runtime.adapter_config import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    PRODUCTS,
    check_fits,
    no_experts,
    read_adapter_config,
    refused_target,
    widths,
)
from runtime.model_config import ModelConfig
from worker.core.sequence import Adapter
from worker.memory.tensors import MappedFiles
from worker.models.checkpoint import FileState
from worker.models.digest import weights_digest
from worker.models.weights import Packed

#: A tensor's name: layer, projection, and which matrix.
_NAME = re.compile(
    r"base_model\.model\.model\.layers\.([0-9]{1,5})\.(?:self_attn\.([qkvo]_proj)|mlp\.((?:gate|up|down)_proj))"
    r"\.lora_([AB])\.weight"
)
_OF_EXPERTS = re.compile(r".*\.mlp\.(experts|gate)\b.*")


#: Projections of one product.
MOST_SEGMENTS = max(map(len, PRODUCTS.values()))


@dataclass(frozen=True, slots=True)
class Matrices:
    """One adapter's matrices, A `[rank, inputs]` and B `[outputs, rank]`, by layer and projection: views of its mapped
    file. digest: 32 bytes over all that it computes with; not its name or place."""

    digest: bytes
    rank: int
    scale: float
    pairs: Mapping[tuple[int, str], tuple[torch.Tensor, torch.Tensor]]
    mapped: MappedFiles


@dataclass(frozen=True, slots=True)
class Adapters:
    """A model's adapters, in a fixed order. numbers: of each name. rank: the largest, to which all are padded; 0: there
    are none."""

    config: ModelConfig
    numbers: Mapping[str, int] = field(default_factory=dict)
    each: Sequence[Matrices] = ()
    rank: int = 0

    @property
    def by_name(self) -> dict[str, Adapter]:
        """As sequences have them."""
        return {name: Adapter(number, self.each[number].digest) for name, number in self.numbers.items()}

    @property
    def digest(self) -> bytes:
        """Over all of them in their order; empty: there are none."""
        return blake3(b"".join(one.digest for one in self.each)).digest() if self.each else b""

    def parts(self, layer: int, dtype: torch.dtype) -> list[Packed]:
        """The tensors of one layer, with the field names of LayerWeights. Made when they are packed, from the files."""
        used = {module for one in self.each for _, module in one.pairs}
        found, sizes = list[Packed](), widths(self.config)
        for product, modules in PRODUCTS.items():
            if not used & set(modules):
                continue
            inputs, outputs = sizes[modules[0]][0], sum(sizes[module][1] for module in modules)
            for matrix, shape in (
                ("a", [len(self.each), len(modules) * self.rank, inputs]),
                ("b", [len(self.each), outputs, self.rank]),
            ):
                made = _Made(self, layer, modules, matrix, shape, dtype)
                found.append(Packed(f"{product}_{matrix}", shape, [], _keep, made))
        return found

    def segments(self, product: str) -> list[int]:
        """Outputs of each projection of a product."""
        sizes = widths(self.config)
        return [sizes[module][1] for module in PRODUCTS[product]]


@dataclass(frozen=True, slots=True)
class _Made:
    """Makes one tensor of a layer."""

    adapters: Adapters
    layer: int
    modules: Sequence[str]
    matrix: str
    shape: Sequence[int]
    dtype: torch.dtype

    def __call__(self) -> torch.Tensor:
        out, rank, sizes = torch.zeros(*self.shape, dtype=self.dtype), self.adapters.rank, widths(self.adapters.config)
        for number, adapter in enumerate(self.adapters.each):
            first = 0
            for at, module in enumerate(self.modules):
                if (pair := adapter.pairs.get((self.layer, module))) is not None:
                    a, b = pair
                    if self.matrix == "a":
                        out[number, at * rank : at * rank + adapter.rank].copy_(a)
                    else:
                        out[number, first : first + len(b), : adapter.rank].copy_(b.float() * adapter.scale)
                    adapter.mapped.forget(a if self.matrix == "a" else b)
                first += sizes[module][1]
        return out


def read_adapters(directories: Mapping[str, Path], config: ModelConfig) -> Adapters:
    """The adapters of a model, by name. Raises ConfigError with the remedy."""
    each = [_read(path, name, config) for name, path in directories.items()]
    numbers = {name: number for number, name in enumerate(directories)}
    return Adapters(config, numbers, each, max((one.rank for one in each), default=0))


def _read(directory: Path, name: str, config: ModelConfig) -> Matrices:
    key = f"adapter {name}:"
    said, file = read_adapter_config(directory, key), directory / ADAPTER_FILE
    check_fits(said, config, f"{key} {directory / ADAPTER_CONFIG}")
    try:
        state = FileState.of(file)
        with safe_open(file, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        if FileState.of(file) != state:
            raise ConfigError(f"{key} {file} was changed while it was opened; start again when it is whole")
    except (SafetensorError, OSError) as e:
        raise ConfigError(f"{key} {file} is not a readable safetensors file: {e}; save the adapter again") from e
    pairs = _pairs(tensors, said.rank, config, f"{key} {file}")
    if missing := sorted((said.targets or frozenset()) - {module for _, module in pairs}):
        raise ConfigError(f"{key} {file} has nothing for {missing[0]}, a target_modules; save the adapter again")
    mapped = MappedFiles([file])
    digest = blake3(b"upbeat adapter" + repr(said.scale).encode() + weights_digest(tensors, mapped.forget)).digest()
    return Matrices(digest, said.rank, said.scale, pairs, mapped)


def _pairs(
    tensors: Mapping[str, torch.Tensor], rank: int, config: ModelConfig, where: str
) -> dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]]:
    """The matrices by layer and projection. Raises ConfigError for a tensor that is not served, or does not fit."""
    found, sizes = dict[tuple[int, str], dict[str, torch.Tensor]](), widths(config)
    for name, tensor in tensors.items():
        matched = _NAME.fullmatch(name)
        of_mlp = matched is not None and matched[3]
        if config.experts is not None and (of_mlp or _OF_EXPERTS.fullmatch(name)):
            raise ConfigError(f"{where}: {name[:120]}: {no_experts(config)}")
        if matched is None:
            raise refused_target(name, where)
        layer, module, matrix = int(matched[1]), matched[2] or matched[3], matched[4]
        shape = [rank, sizes[module][0]] if matrix == "A" else [sizes[module][1], rank]
        if layer >= config.layers or list(tensor.shape) != shape or not tensor.is_floating_point():
            raise ConfigError(
                f"{where}: {name} is {tensor.dtype} {list(tensor.shape)}; with r = {rank} this model, of "
                f"{config.layers} layers, takes {shape} there; give the adapter of this model"
            )
        found.setdefault((layer, module), {})[matrix] = tensor
    for (layer, module), matrices in found.items():
        if len(matrices) < 2:
            raise ConfigError(f"{where} has one matrix only for {module} of layer {layer}; save the adapter again")
    if not found:
        raise ConfigError(f"{where} has no matrices; save the adapter again")
    return {at: (matrices["A"], matrices["B"]) for at, matrices in found.items()}


def _keep(tensor: torch.Tensor) -> None:
    """A made tensor is no page of a file."""
