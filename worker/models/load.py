"""Loads a model from a Hugging Face directory into device memory, in the type in which it is served."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from contracts.errors import ConfigError
from contracts.kv import DTYPE_BYTES, KvShape, fingerprint
from runtime.model_config import ModelConfig, load_config, read_json, token_ids
from worker.core.granules import OutOfGranules, Owner, Use
from worker.memory.device_memory import DeviceMemory
from worker.models.digest import cached_weights_digest, model_digest
from worker.models.llama import RopeTable
from worker.models.weights import Checkpoint, Pack, SlotTable, TopWeights, WeightSpan, layer_parts, top_parts

#: With type `auto`, models with at most this many bytes of weights are served in float32.
FLOAT32_LIMIT_BYTES = 64 << 20


@dataclass(slots=True)
class Model:
    """A loaded model.

    layers: the slot table; layers may be unloaded and loaded again between steps.
    weight_bytes: physical bytes of its weights when all layers are loaded.
    """

    config: ModelConfig
    shape: KvShape
    dtype: torch.dtype
    layers: SlotTable
    top: TopWeights
    rope: RopeTable
    max_tokens: int
    eos_ids: set[int]
    weight_bytes: int

    def unload_layer(self, layer: int) -> int:
        """Gives the granules of `layer` back; returns their number."""
        return self.layers.unload_layer(layer)

    def load_layer(self, layer: int) -> None:
        """Fills `layer` again. Raises OutOfGranules, changing nothing, when too few are free."""
        self.layers.load_layer(layer)


def load_model(
    directory: Path,
    memory: DeviceMemory,
    dtype: str,
    device: str,
    chunk_tokens: int,
    cache_dir: Path | None,
    pack: Pack | None = None,
    name: str = "",
) -> Model:
    """Loads the model in `directory`, with its weights in `memory`, owned by `name` (empty: the directory's name).

    dtype, device: as configured (`worker.dtype`, `worker.device`). cache_dir: cache of weight digests. pack: lays out
    matrices for the kernels; the model then works with these kernels only. Raises ConfigError with the remedy.
    """
    if device not in ("auto", memory.device.type):
        raise ConfigError(
            f"worker.device = {device!r} is not where the memory is; set worker.device: {memory.device.type}"
        )
    config = load_config(directory)
    checkpoint = Checkpoint(directory)
    served = choose_dtype(dtype, checkpoint)
    owner = Owner(Use.WEIGHTS, name or directory.name)
    layers = SlotTable(
        [WeightSpan(memory, owner, layer_parts(checkpoint, config, n), served, pack) for n in range(config.layers)]
    )
    top = WeightSpan(memory, owner, top_parts(checkpoint, config), served)
    checkpoint.check_all_taken()
    weight_bytes = top.bytes + sum(layers.layer_granules(n) for n in range(config.layers)) * memory.granule_bytes
    try:
        views = top.load()
        for n in range(config.layers):
            layers.load_layer(n)
    except OutOfGranules:
        raise ConfigError(
            f"kv.hbm_gib: the weights of {directory} need {weight_bytes / 2**30:.2f} GiB of the device's "
            f"{memory.total * memory.granule_bytes / 2**30:.2f} GiB; raise kv.hbm_gib to more than that, the KV "
            "cache included"
        ) from None
    digest = model_digest(cached_weights_digest(checkpoint, cache_dir), config)
    name = str(served).removeprefix("torch.")
    return Model(
        config=config,
        shape=KvShape.of_heads(
            fingerprint=fingerprint(digest, dtype=name, chunk_tokens=chunk_tokens),
            layers=config.layers,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            chunk_tokens=chunk_tokens,
            dtype=name,
        ),
        dtype=served,
        layers=layers,
        top=TopWeights(views["embedding"], views["norm"], views.get("head", views["embedding"])),
        rope=RopeTable(config, served),
        max_tokens=config.max_tokens,
        eos_ids=find_eos_ids(directory, config),
        weight_bytes=weight_bytes,
    )


def choose_dtype(dtype: str, checkpoint: Checkpoint) -> torch.dtype:
    """`auto`: float32 for at most FLOAT32_LIMIT_BYTES of weights (so that answers can be compared exactly), else the
    checkpoint's type."""
    if dtype != "auto":
        if dtype not in DTYPE_BYTES:
            raise ConfigError(f"worker.dtype = {dtype!r} is not one of auto, {', '.join(DTYPE_BYTES)}")
        return torch.float32 if dtype == "float32" else torch.bfloat16 if dtype == "bfloat16" else torch.float16
    if checkpoint.bytes <= FLOAT32_LIMIT_BYTES:
        return torch.float32
    if str(checkpoint.dtype).removeprefix("torch.") not in DTYPE_BYTES:
        raise ConfigError(
            f"worker.dtype = 'auto': the checkpoint's {checkpoint.dtype} is not served; set one of "
            f"{', '.join(DTYPE_BYTES)}"
        )
    return checkpoint.dtype


def find_eos_ids(directory: Path, config: ModelConfig) -> set[int]:
    """All tokens that end an answer: the union of generation_config.json, config.json and the tokenizer's
    `eos_token`."""
    found = set(config.eos_ids)
    generation = directory / "generation_config.json"
    if generation.exists():
        found |= token_ids(read_json(generation).get("eos_token_id"), f"{generation}: eos_token_id")
    settings, vocabulary = directory / "tokenizer_config.json", directory / "tokenizer.json"
    if settings.exists() and vocabulary.exists():
        name = read_json(settings).get("eos_token")
        name = name.get("content") if isinstance(name, dict) else name
        found |= {t["id"] for t in read_json(vocabulary).get("added_tokens") or [] if t.get("content") == name}
    return found
