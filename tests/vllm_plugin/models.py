"""Small random models of which every answer depends on all of its context, so that a wrong KV shows."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from loadtest.random_model import SHAPES, make_random_model

SMALL: dict[str, Any] = SHAPES["tiny"][0] | {"hidden_size": 256, "head_dim": 64, "num_hidden_layers": 6}
#: By how much a projection enlarges its input. With less, as `make_random_model` has it, an answer depends on hardly
#: more than the last token's embedding.
_GAIN = 1.9
_DEVIATION = 0.02


def sensitive_llama(directory: Path, shape: dict[str, Any] = SMALL, seed: int = 1) -> Path:
    """A Llama of this shape in float32, with a head of its own, written into `directory`."""
    make_random_model(directory, shape | {"tie_word_embeddings": False}, seed, "float32")
    weights = load_file(directory / "model.safetensors")
    scaled = {
        name: w * (_GAIN / _DEVIATION / math.sqrt(w.shape[1])) if "_proj" in name or name == "lm_head.weight" else w
        for name, w in weights.items()
    }
    save_file(scaled, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def lora_adapter(directory: Path, seed: int, rank: int = 8) -> Path:
    """An adapter of keys and values for `sensitive_llama`; replaces one that is there."""
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    hidden, width = SMALL["hidden_size"], SMALL["num_key_value_heads"] * SMALL["head_dim"]
    tensors = {}
    for layer in range(SMALL["num_hidden_layers"]):
        for name in ("k", "v"):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}_proj."
            tensors[prefix + "lora_A.weight"] = torch.randn((rank, hidden), generator=generator) * 0.1
            tensors[prefix + "lora_B.weight"] = torch.randn((width, rank), generator=generator) * 0.1
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "m",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["k_proj", "v_proj"],
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
