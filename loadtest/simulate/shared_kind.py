"""A kind of device that several models share: its memory, its models, and what it takes to map and copy.

Measured on an H100 80GB (bench/gpu/result.json): 55 GB/s from page-locked memory; 27 microseconds to map a granule of 2
MiB that has its memory; 18 to unmap one (weights leave on another thread: here they cost the device as much). With
these an 8B model takes 0.50 s to come; measured: 0.45 to 0.50 s. An A100 copies at PCIe 4.0's 25 GB/s, a GH200 at
NVLink-C2C's 450 GB/s; mapping is assumed to take as long.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from contracts.memory.slab_size import slab_granules
from loadtest.simulate.costs import Device, ModelShape, NodeKind
from loadtest.simulate.presets import ACTIVATION_BYTES, USABLE, node_of
from loadtest.simulate.turns import coarse

GRANULE_BYTES = 2 << 20
#: Bytes a second of copies of weights, and seconds to map and to unmap a granule.
COPY_BYTES_S = {"A100": 25e9, "H100": 55e9, "H200": 55e9, "GH200": 450e9}
MAP_S, UNMAP_S = 27e-6, 18e-6
#: Tokens of a chunk of KV, coarser than the 64 of real nodes.
CHUNK_TOKENS = 128


@dataclass(frozen=True, slots=True)
class SharedModel:
    """A registered model. kind: its KV's shape, its costs and limits; `kind.hbm_bytes` is not used. fixed_granules: of
    its KV with `sharing: static`; 0: all models have equal parts."""

    kind: NodeKind
    weight_bytes: float
    pinned: bool = False
    fixed_granules: int = 0

    @property
    def name(self) -> str:
        """The model's name."""
        return self.kind.model

    @property
    def granules(self) -> int:
        """Granules of its weights."""
        return -int(-self.weight_bytes // GRANULE_BYTES)

    @property
    def layers(self) -> int:
        """Layers of its weights; its KV's shape may have fewer."""
        return self.kind.layers_modelled or self.kind.shape.layers

    @property
    def layer_granules(self) -> int:
        """Granules of a layer."""
        return self.granules // self.layers

    @property
    def slab_granules(self) -> int:
        """Granules of a slab of its KV."""
        return slab_granules(self.kind.shape.piece_bytes, GRANULE_BYTES)

    @property
    def pages_per_slab(self) -> int:
        """Pages of a slab of its KV."""
        return self.slab_granules * GRANULE_BYTES // self.kind.shape.piece_bytes


@dataclass(frozen=True, slots=True)
class SharedKind:
    """See the module. granules: for weights and KV. copy_bytes_s: of weights; map_s, unmap_s: of a granule. dram_bytes:
    of the KV's store."""

    name: str
    granules: int
    models: tuple[SharedModel, ...]
    copy_bytes_s: float
    map_s: float = MAP_S
    unmap_s: float = UNMAP_S
    dram_bytes: float = 60e9

    def of(self, models: Sequence[str]) -> SharedKind:
        """The same device with only these models."""
        return replace(self, models=tuple(m for m in self.models if m.name in models))

    def transfer_s(self, model: SharedModel) -> float:
        """Time to copy a layer."""
        return model.weight_bytes / model.layers / self.copy_bytes_s

    def activation_s(self, model: SharedModel) -> float:
        """Time until all weights are here, with nothing else on the bus."""
        return model.weight_bytes / self.copy_bytes_s + model.granules * self.map_s


def shared_kind(
    device: Device,
    shapes: Sequence[ModelShape],
    *,
    max_tokens: int = 32_768,
    request_s: float = 0.0,
    chunk_tokens: int = CHUNK_TOKENS,
) -> SharedKind:
    """A device with these models. Two of one shape get numbered names. Raises KeyError for a device whose rate of
    copies is not known (`COPY_BYTES_S`)."""
    models, count = list[SharedModel](), itertools.count()
    names = [shape.name for shape in shapes]
    for shape in shapes:
        number = next(count)
        name = f"{shape.name}#{names[: number + 1].count(shape.name)}" if names.count(shape.name) > 1 else shape.name
        named = replace(shape, name=name)
        kind = node_of(device, named, max_tokens)
        fine = replace(kind.shape, fingerprint=number.to_bytes(32, "big"))
        models.append(
            SharedModel(
                replace(
                    kind,
                    shape=coarse(fine, chunk_tokens=chunk_tokens),
                    layers_modelled=shape.layers,
                    request_s=request_s,
                ),
                shape.weight_bytes,
            )
        )
    usable = device.memory_bytes * USABLE - ACTIVATION_BYTES
    return SharedKind(device.name, int(usable // GRANULE_BYTES), tuple(models), COPY_BYTES_S[device.name.split("-")[0]])
