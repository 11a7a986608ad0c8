"""LoRA adapters for tests, with random matrices, and models into which they are merged: W + scale * B A, nothing
else."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ATTENTION = ALL[:4]


@dataclass(frozen=True)
class Lora:
    """What an adapter is made of."""

    rank: int = 4
    alpha: float = 8.0
    targets: Sequence[str] = ALL
    rslora: bool = False
    seed: int = 1
    layers: Sequence[int] | None = None
    size: float = 0.3

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def make_adapter(directory: Path, model: torch.nn.Module, lora: Lora, **more: Any) -> Path:
    """Writes an adapter of `model` as PEFT does. more: keys of its configuration."""
    draw, tensors = torch.Generator().manual_seed(lora.seed), {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in lora.targets:
            if lora.layers is not None and int(name.split(".")[2]) not in lora.layers:
                continue
            outputs, inputs = module.weight.shape
            for matrix, shape in (("A", (lora.rank, inputs)), ("B", (outputs, lora.rank))):
                value = torch.randn(*shape, generator=draw) * lora.size
                tensors[f"base_model.model.{name}.lora_{matrix}.weight"] = value
    config = {
        "peft_type": "LORA",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rslora,
        "target_modules": list(lora.targets),
        "layers_to_transform": lora.layers,
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
    }
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text(json.dumps(config | more))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def merged(model: Any, directory: Path, lora: Lora) -> Any:
    """A copy of `model` with the adapter in `directory` in its weights."""
    made, tensors = copy.deepcopy(model), load_file(directory / "adapter_model.safetensors")
    with torch.no_grad():
        for name, a in tensors.items():
            if ".lora_A." in name:
                path = name.removeprefix("base_model.model.").replace(".lora_A", "")
                b = tensors[name.replace(".lora_A.", ".lora_B.")]
                made.get_parameter(path).add_(lora.scale * (b.double() @ a.double()).float())
    return made
