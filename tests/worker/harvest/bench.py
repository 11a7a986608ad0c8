"""Tiny random models of each family with all their weights at hand, examples for them, and gates and windows that
misbehave."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from contracts.finetune import Settings
from runtime.model_config import ModelConfig, load_config
from worker.harvest.adapter import Adapter
from worker.harvest.data import Examples
from worker.harvest.gate import Frozen, Gate, OpenGate, Stopped
from worker.harvest.partition import Partition
from worker.harvest.training import Trainer
from worker.models.checkpoint import Checkpoint
from worker.models.weights import LayerWeights, TopWeights, layer_parts, top_parts

SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral-window": ("Mistral", {"sliding_window": 11}),
    "qwen2-some-windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
}
SETTINGS = Settings(rank=4, alpha=8.0, learning_rate=1e-2, epochs=2, batch_size=3)
PARTITION = Partition(rows=8, head_rows=8, columns=32)


def make_model(
    directory: Path, family: str = "llama", dtype: torch.dtype = torch.float32, **more: Any
) -> transformers.PreTrainedModel:
    """A random model, saved to `directory`; norms and biases are random too, so that none can be forgotten. more: of
    its configuration."""
    name, extra = FAMILIES[family]
    torch.manual_seed(sorted(FAMILIES).index(family))
    config = getattr(transformers, f"{name}Config")(**SIZES | extra | more)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for value in model.parameters():
            if value.dim() == 1:
                value.add_(torch.randn_like(value) * 0.2)
    model = model.to(dtype)
    model.save_pretrained(directory)
    return model


class AllLayers:
    """All weights of a model in plain memory. Counts what is held."""

    def __init__(self, directory: Path, dtype: torch.dtype = torch.float32) -> None:
        config, checkpoint = load_config(directory), Checkpoint(directory)

        def whole(parts: list[Any]) -> dict[str, torch.Tensor]:
            return {part.field: torch.cat(part.sources).to(dtype) for part in parts}

        self.layers = [LayerWeights(**whole(layer_parts(checkpoint, config, n))) for n in range(config.layers)]
        top = whole(top_parts(checkpoint, config))
        self._top = TopWeights(top["embedding"], top["norm"], top.get("head", top["embedding"]))
        self.held: Counter[int] = Counter()
        self.order: list[tuple[int, bool]] = []

    def next(self, layer: int, forward: bool) -> None:
        self.order.append((layer, forward))

    def acquire(self, layer: int) -> LayerWeights:
        self.held[layer] += 1
        return self.layers[layer]

    def release(self, layer: int) -> None:
        self.held[layer] -= 1

    def top(self) -> TopWeights:
        return self._top


class OneLayerAtATime(AllLayers):
    """A window of one layer: others are moved in late, to other addresses, and what left is overwritten."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._lock, self._here = threading.Condition(), -1
        self._copy: LayerWeights | None = None

    def acquire(self, layer: int) -> LayerWeights:
        with self._lock:
            self._lock.wait_for(lambda: self._here == layer or not sum(self.held.values()))
            if self._here != layer or (random.random() < 0.2 and not self.held[layer]):
                self._leave()
                time.sleep(random.random() * 1e-3)
                fields = {name: getattr(self.layers[layer], name) for name in LayerWeights.__slots__}
                self._copy = LayerWeights(**{name: None if t is None else t.clone() for name, t in fields.items()})
                self._here = layer
            self.held[layer] += 1
            assert self._copy is not None
            return self._copy

    def release(self, layer: int) -> None:
        with self._lock:
            self.held[layer] -= 1
            self._lock.notify_all()

    def _leave(self) -> None:
        if self._copy is not None:
            for name in LayerWeights.__slots__:
                tensor = getattr(self._copy, name)
                if tensor is not None:
                    tensor.fill_(float("nan"))


class RestlessGate(OpenGate):
    """Lets a random number of lanes compute, and changes its mind all the time; at least one goes on."""

    def __init__(self, lanes: int, seed: int) -> None:
        self._random, self._lanes, self._allowed = random.Random(seed), lanes, lanes
        self._lock = threading.Condition()
        self.entered: Counter[int] = Counter()

    def enter(self, lane: int) -> None:
        with self._lock:
            if self._random.random() < 0.2:
                self._allowed = self._random.randint(1, self._lanes)
                self._lock.notify_all()
            # Which lanes are held back turns too.
            self._lock.wait_for(lambda: lane < self._allowed)
            self.entered[lane] += 1
            wait_s = self._random.random() * 2e-4
        time.sleep(wait_s)

    def leave(self, lane: int, seconds: float) -> None:
        with self._lock:
            if self._random.random() < 0.2:
                self._allowed = self._random.randint(1, self._lanes)
            self._lock.notify_all()


class StoppingGate(OpenGate):
    """Raises Stopped after so many units."""

    def __init__(self, units: int) -> None:
        self.units = units
        self._lock = threading.Lock()

    def enter(self, lane: int) -> None:
        with self._lock:
            self.units -= 1
            if self.units < 0:
                raise Stopped


def examples(lengths: list[int], seed: int = 0, vocab: int = 101) -> Examples:
    """Random examples, about half of whose tokens are targets."""
    drawn = np.random.default_rng(seed)
    tokens = [drawn.integers(0, vocab, n).astype(np.int32) for n in lengths]
    targets = [drawn.random(n) < 0.5 for n in lengths]
    for flags in targets:
        flags[-1] = True
    return Examples(tokens, targets)


def random_adapter(config: ModelConfig, settings: Settings = SETTINGS, seed: int = 7) -> Adapter:
    """An adapter whose B is not 0, so that every gradient is something."""
    adapter = Adapter(config, settings)
    adapter.flat.normal_(0, 0.2, generator=torch.Generator().manual_seed(seed))
    return adapter


def make_trainer(
    directory: Path,
    data: Examples,
    settings: Settings = SETTINGS,
    *,
    validation: Examples | None = None,
    frozen: Frozen | None = None,
    gate: Gate | None = None,
    lanes: int = 1,
    partition: Partition = PARTITION,
    adapter: Adapter | None = None,
) -> Trainer:
    config = load_config(directory)
    return Trainer(
        config,
        settings,
        data,
        validation,
        frozen or AllLayers(directory),
        gate or OpenGate(),
        partition,
        adapter or Adapter(config, settings),
        lanes,
    )
