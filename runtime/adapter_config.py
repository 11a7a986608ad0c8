"""Parses a LoRA adapter's adapter_config.json, as PEFT writes it: which adapters are served, and how they are scaled.

Low-rank products beside the projections of attention and of dense MLPs are served. A key that would change the output
otherwise is refused by name; so is an unknown one, unless it is off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from contracts.errors import ConfigError
from runtime.model_config import ModelConfig, read_json
from runtime.model_keys import Keys

ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
#: The served projections, by the packed product that they belong to (`worker.models.weights.LayerWeights`), in order.
PRODUCTS: Final[dict[str, tuple[str, ...]]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "out": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
MODULES: Final = tuple(module for modules in PRODUCTS.values() for module in modules)
_OF_MLP: Final = frozenset((*PRODUCTS["gate_up"], *PRODUCTS["down"]))
MOST_RANK = 256
_MOST_CONFIG_BYTES, _MOST_FILE_BYTES = 1 << 20, 4 << 30
_MERGE = "merge it into its base (PEFT's merge_and_unload), and serve the merged model under models.NAME.path"
#: Keys that do not change what a trained adapter computes.
_FREE = frozenset(
    {
        *("peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "bias", "init_lora_weights", "task_type"),
        *("auto_mapping", "base_model_name_or_path", "revision", "peft_version", "inference_mode", "lora_dropout"),
        *("exclude_modules", "layers_to_transform", "layers_pattern", "runtime_config", "ephemeral_gpu_offload"),
        *("eva_config", "corda_config", "lora_ga_config", "megatron_core", "qalora_group_size", "ensure_weight_tying"),
    }
)
#: Ways to begin an adapter that change the base's weights too.
_CHANGE_THE_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """rank: of all its matrices. scale: factor of its products. targets: projections; None: the file says which."""

    rank: int
    scale: float
    targets: frozenset[str] | None


def read_adapter_config(directory: Path, key: str) -> AdapterConfig:
    """The configuration of the adapter in `directory`. key: names its source in errors. Raises ConfigError with the
    remedy."""
    if not directory.is_dir():
        raise ConfigError(
            f"{key} {directory}: no such directory; give one with {ADAPTER_CONFIG} and {ADAPTER_FILE}, as PEFT's "
            "save_pretrained writes it"
        )
    for name, most in ((ADAPTER_CONFIG, _MOST_CONFIG_BYTES), (ADAPTER_FILE, _MOST_FILE_BYTES)):
        file = directory / name
        if not file.is_file():
            raise ConfigError(f"{key} {directory}: it has no {name}; save the adapter with PEFT's save_pretrained")
        if (size := file.stat().st_size) > most:
            raise ConfigError(f"{key} {file}: it has {size} bytes; adapters with at most {most} are served; {_MERGE}")
    try:
        return parse_adapter_config(read_json(directory / ADAPTER_CONFIG), str(directory / ADAPTER_CONFIG))
    except RecursionError:
        raise ConfigError(f"{key} {directory / ADAPTER_CONFIG}: it is nested too deeply; save it again") from None


def parse_adapter_config(data: dict[str, Any], where: str = ADAPTER_CONFIG) -> AdapterConfig:
    """An AdapterConfig from the file's content. Raises ConfigError naming the key, the value and `where`."""
    get = Keys(data, where)
    if data.get("peft_type") != "LORA":
        raise get.wrong("peft_type", f"is not served; served: LORA; {_MERGE}")
    if data.get("bias", "none") != "none":
        raise get.wrong("bias", f"is not served; train with bias = none, or {_MERGE}")
    how = data.get("init_lora_weights")
    if isinstance(how, str) and how.lower().startswith(_CHANGE_THE_BASE):
        raise get.wrong(
            "init_lora_weights", "changes the base's weights; convert the adapter to LoRA with PEFT's save_pretrained("
            "..., path_initial_model_for_weight_conversion=...)"
        )  # fmt: skip
    for name in sorted(data.keys() - _FREE):
        if data[name]:
            shown = {**data, name: str(data[name])[:80]}
            raise Keys(shown, where).wrong(name[:80], f"is not served; {_MERGE}")
    rank = get.integer("r")
    if rank > MOST_RANK:
        raise get.wrong("r", f"is above {MOST_RANK}, the highest rank that is served; {_MERGE}")
    alpha = get.number("lora_alpha", 8.0)
    scale = alpha / (math.sqrt(rank) if get.boolean("use_rslora", False) else rank)
    if not math.isfinite(scale):
        raise get.wrong("lora_alpha", "must be a finite number")
    return AdapterConfig(rank, scale, _targets(get))


def check_fits(adapter: AdapterConfig, model: ModelConfig, where: str) -> None:
    """Raises ConfigError when the adapter has projections that are not served with this model."""
    if model.experts is not None and adapter.targets is not None and (of_mlp := sorted(adapter.targets & _OF_MLP)):
        raise ConfigError(f"{where}: target_modules has {of_mlp[0]}: {no_experts(model)}")


def no_experts(model: ModelConfig) -> str:
    """Why an adapter of an MLP is refused, where a model has experts."""
    return f"adapters of the experts of {model.architecture} are not served; train attention only, or {_MERGE}"


def widths(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of each projection."""
    hidden, q, kv, mlp = model.hidden_size, model.heads * model.head_dim, model.kv_heads * model.head_dim, 0
    if model.experts is None:
        mlp = model.intermediate_size
    sizes = [(hidden, q), (hidden, kv), (hidden, kv), (q, hidden), (hidden, mlp), (hidden, mlp), (mlp, hidden)]
    return dict(zip(MODULES, sizes, strict=True))


def elements(model: ModelConfig, adapters: list[AdapterConfig]) -> int:
    """Numbers on the device for these adapters of a model: all are padded to the largest rank and to all their
    projections together."""
    rank = max((adapter.rank for adapter in adapters), default=0)
    used = frozenset[str]().union(*(MODULES if a.targets is None else a.targets for a in adapters))
    sizes, total = widths(model), 0
    for modules in PRODUCTS.values():
        if used & set(modules) and sizes[modules[0]][1]:
            total += rank * sum(sum(sizes[module]) for module in modules)
    return len(adapters) * model.layers * total


def refused_target(name: str, where: str) -> ConfigError:
    """The error of a projection or a tensor that is not served."""
    return ConfigError(f"{where}: {name[:120]} is not served with an adapter; served: {', '.join(MODULES)}; {_MERGE}")


def _targets(get: Keys) -> frozenset[str] | None:
    """The projections that are named one by one; None: a pattern."""
    value = get.data.get("target_modules")
    if isinstance(value, str):
        return None
    if not isinstance(value, list) or not value or not all(isinstance(name, str) for name in value):
        raise get.wrong("target_modules", f"must be a list of projections, such as [{MODULES[0]}, {MODULES[2]}]")
    found = {name.rpartition(".")[2] for name in value}
    if others := sorted(found - set(MODULES)):
        raise refused_target(f"target_modules = {others[0]}", get.where)
    return frozenset(found)
