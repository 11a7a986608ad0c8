"""A model from a Hugging Face directory: its weights' places in device memory, in the type in which it is served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from contracts.errors import ConfigError
from contracts.kv import DTYPE_BYTES, KvShape, fingerprint
from runtime.model_config import ModelConfig, adapter_digest, load_config, read_json, token_ids
from runtime.model_gemma import GEMMA_WITH_IMAGES
from worker.core.granules import OutOfGranules, Owner, Use
from worker.memory.device_memory import DeviceMemory
from worker.models.adapters import Adapters, read_adapters
from worker.models.checkpoint import Checkpoint
from worker.models.digest import cached_weights_digest, model_digest
from worker.models.llama import RopeTable
from worker.models.weights import Pack, SlotTable, TopWeights, WeightSpan, layer_parts, top_parts

#: With type `auto`, models with at most this many bytes of weights are served in float32.
FLOAT32_LIMIT_BYTES = 64 << 20


@dataclass(slots=True)
class Model:
    """A model, on the device or not.

    layers: the slot table; layers may be unloaded and loaded again between steps. top: valid while it is loaded. rope,
    local_rope: see `rope_of`.
    spans: of the top weights, then of each layer. weight_bytes: physical bytes of its weights when all are loaded.
    adapters: LoRA adapters, whose matrices lie in the layers' spans.
    """

    config: ModelConfig
    shape: KvShape
    dtype: torch.dtype
    layers: SlotTable
    top: TopWeights
    rope: RopeTable
    max_tokens: int
    eos_ids: set[int]
    spans: list[WeightSpan]
    weight_bytes: int
    adapters: Adapters
    local_rope: RopeTable | None = None

    def rope_of(self, layer: int) -> RopeTable:
        """The rotary table of a layer: that of layers with a window, if they have their own, or the model's."""
        return self.rope if self.local_rope is None or self.config.windows[layer] is None else self.local_rope

    def ropes(self) -> set[RopeTable]:
        """The rotary tables that its layers use."""
        return {self.rope_of(layer) for layer in range(self.config.layers)}

    def take(self) -> None:
        """Takes granules for all weights, and sets the slots; `Filling` maps and fills them. Raises OutOfGranules, when
        some may be taken."""
        for span in self.spans:
            span.take()
        for layer in range(len(self.layers)):
            self.layers.fill_slot(layer)

    def unload(self, *, keep: bool = True) -> None:
        """Gives all granules of its weights back. No step may use them. keep: their memory stays allocated."""
        for layer in range(len(self.layers)):
            self.layers.unload_layer(layer, keep=keep)
        self.spans[0].unload(keep=keep)

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
    adapters: Mapping[str, Path] | None = None,
) -> Model:
    """The model in `directory`, loaded. Arguments and errors are those of `lay_out`; also raises ConfigError when the
    weights do not fit."""
    model = lay_out(directory, memory, dtype, device, chunk_tokens, cache_dir, pack, name, adapters)
    load(model, directory, memory)
    return model


def load(model: Model, directory: Path, memory: DeviceMemory) -> None:
    """Load all weights from the checkpoint in `directory`. Raises ConfigError when they do not fit."""
    try:
        model.spans[0].load()
        for n in range(model.config.layers):
            model.load_layer(n)
    except OutOfGranules:
        raise too_large(directory, model, memory) from None


def too_large(directory: Path, model: Model, memory: DeviceMemory) -> ConfigError:
    """The error of weights that do not fit on the device."""
    return ConfigError(
        f"kv.hbm_gib: the weights of {directory} need {model.weight_bytes / 2**30:.2f} GiB of the device's "
        f"{memory.total * memory.granule_bytes / 2**30:.2f} GiB; raise kv.hbm_gib to more than that, the KV "
        "cache included"
    )


def lay_out(
    directory: Path,
    memory: DeviceMemory,
    dtype: str,
    device: str,
    chunk_tokens: int,
    cache_dir: Path | None,
    pack: Pack | None = None,
    name: str = "",
    adapters: Mapping[str, Path] | None = None,
) -> Model:
    """The model in `directory`, with places for its weights in `memory`, owned by `name` (empty: the directory's name);
    nothing is loaded.

    dtype, device: as configured (`worker.dtype`, `worker.device`). cache_dir: cache of weight digests. pack: lays out
    matrices for the kernels; the model then works with these kernels only. adapters: directories of LoRA adapters by
    name. Raises ConfigError with the remedy.
    """
    if device not in ("auto", memory.device.type):
        raise ConfigError(
            f"worker.device = {device!r} is not where the memory is; set worker.device: {memory.device.type}"
        )
    config = load_config(directory)
    checkpoint = Checkpoint(directory)
    if config.architecture == GEMMA_WITH_IMAGES:
        checkpoint.leave_images()
    served = choose_dtype(dtype, checkpoint)
    owner = Owner(Use.WEIGHTS, name or directory.name)
    beside = read_adapters(adapters or {}, config)
    layers = [
        WeightSpan(memory, owner, [*layer_parts(checkpoint, config, n), *beside.parts(n, served)], served, pack)
        for n in range(config.layers)
    ]
    top = WeightSpan(memory, owner, top_parts(checkpoint, config), served)
    checkpoint.check_all_taken()
    digest = model_digest(cached_weights_digest(checkpoint, cache_dir), config)
    dtype_name = str(served).removeprefix("torch.")
    return Model(
        config=config,
        shape=KvShape.of_heads(
            fingerprint=fingerprint(
                digest, dtype=dtype_name, chunk_tokens=chunk_tokens, adapter=adapter_digest(directory)
            ),
            layers=config.layers,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            chunk_tokens=chunk_tokens,
            dtype=dtype_name,
            windows=tuple(window or 0 for window in config.windows) if any(config.windows) else (),
        ),
        dtype=served,
        layers=SlotTable(layers),
        top=TopWeights(top.views["embedding"], top.views["norm"], top.views.get("head", top.views["embedding"])),
        rope=RopeTable(config, served),
        max_tokens=config.max_tokens,
        eos_ids=find_eos_ids(directory, config),
        spans=[top, *layers],
        weight_bytes=sum(span.bytes for span in (top, *layers)),
        adapters=beside,
        local_rope=RopeTable(config, served, config.gemma.local_rope) if config.gemma else None,
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
