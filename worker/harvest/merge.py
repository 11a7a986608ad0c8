"""A model of its own from a base model and an adapter: W + scale * B A for each projection, in the base's type.

Matrices are read, merged and written one by one, some rows at a time. config.json gets the adapter's digest
(`runtime.model_config.adapter_digest`), which joins the model's fingerprint, so that models of one base share no KV
even where their weights are equal.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from blake3 import blake3
from safetensors import safe_open

from contracts.errors import ConfigError
from runtime.model_config import ADAPTER_KEY, adapter_digest, load_config, read_json
from worker.harvest.adapter import Shapes, base_name, matrix_names
from worker.harvest.checkpoints import ADAPTER_CONFIG, ADAPTER_FILE
from worker.harvest.gate import OPEN, Gate, within
from worker.harvest.tensor_files import disk_errors, file_digest, write_tensors, write_text, written_whole
from worker.models.checkpoint import Checkpoint

#: What a model's directory has beside weights and config.json.
_COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "model.safetensors.index.json",
)
#: Elements that are merged in a unit.
_UNIT_ELEMENTS = 1 << 20


def merge(base: Path, adapter: Path, merged: Path, gate: Gate = OPEN) -> str:
    """Writes the model in `base` with the adapter in `adapter` (this package's, as PEFT has it) to `merged`, a
    directory that is there whole or not at all; one that was there is replaced. Returns the adapter's hexadecimal
    digest. Computes on lane 0 of `gate`. Raises ConfigError, and Stopped."""
    deltas = _Deltas(base, adapter)
    checkpoint = Checkpoint(base)
    missing = deltas.pairs.keys() - checkpoint.tensors.keys()
    if missing:
        raise ConfigError(f"{base} has no tensor {min(missing)}, which the adapter in {adapter} changes")
    if merged.exists() and not ((merged / "config.json").exists() and adapter_digest(merged)):
        raise ConfigError(f"{merged} is no merged model, and would be overwritten; choose another directory")
    with written_whole(merged) as directory:
        for name in _COPIED:
            if (base / name).exists():
                shutil.copyfile(base / name, directory / name)
        config = read_json(base / "config.json") | {ADAPTER_KEY: deltas.digest}
        write_text(directory / "config.json", json.dumps(config, indent=2) + "\n")
        for file in checkpoint.files:
            with disk_errors(file), safe_open(file, framework="pt") as opened:
                names = list(opened.keys())
            tensors = {name: checkpoint.tensors[name] for name in names}
            shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
            written = _merged(checkpoint, tensors, deltas, gate)
            write_tensors(directory / file.name, shapes, written, gate)
    return deltas.digest


class _Deltas:
    """An adapter's matrices by the names of what they change. digest: over its files' content."""

    def __init__(self, base: Path, adapter: Path) -> None:
        said = read_json(adapter / ADAPTER_CONFIG)
        config = load_config(base)
        try:
            rank, alpha = int(said["r"]), float(said["lora_alpha"])
            shapes = Shapes.of(config, rank)
            self.scale = alpha / rank
            self.pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
            with safe_open(adapter / ADAPTER_FILE, framework="pt") as file:
                for layer in range(config.layers):
                    for module, (width, height) in shapes.widths.items():
                        a, b = (file.get_tensor(name) for name in matrix_names(layer, module))
                        if (*a.shape, *b.shape) != (rank, width, height, rank):
                            raise ConfigError(f"{adapter}: the adapter of layer {layer}'s {module} is not of {base}")
                        self.pairs[base_name(layer, module)] = a, b
            self.digest = blake3(json.dumps([rank, alpha, file_digest(adapter / ADAPTER_FILE)]).encode()).hexdigest()
        except ConfigError:
            raise
        except Exception as e:  # the library's own errors, and a file of another kind
            raise ConfigError(f"{adapter} holds no adapter of {base}: {e}; give the directory of a finished job") from e


def _merged(
    checkpoint: Checkpoint, tensors: dict[str, torch.Tensor], deltas: _Deltas, gate: Gate
) -> Iterator[torch.Tensor]:
    for name, tensor in tensors.items():
        if name in deltas.pairs:
            yield _sum(tensor, *deltas.pairs[name], deltas.scale, gate)
        else:
            yield tensor
        checkpoint.forget(tensor)


def _sum(tensor: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, gate: Gate) -> torch.Tensor:
    """`tensor [output, input]` + scale * B A, computed in float32, in the tensor's type."""
    out = torch.empty_like(tensor)
    rows = max(1, _UNIT_ELEMENTS // tensor.shape[1])
    for first in range(0, len(tensor), rows):
        part = slice(first, first + rows)
        with within(gate):
            out[part] = tensor[part].float().addmm(b[part].float(), a.float(), alpha=scale).to(tensor.dtype)
    return out
