"""The parameters of a LoRA adapter (arXiv 2106.09685): two matrices beside each projection of each layer.

A layer's parameters are one flat float32 vector, so that adding gradients, their norm and the optimizer each are one
operation a layer. Names and initial values are those of PEFT.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from blake3 import blake3

from contracts.errors import ConfigError
from contracts.finetune import Settings
from runtime.model_config import ModelConfig

#: Allocates a tensor of a shape and a type, on a multiple of 64 bytes; its content is undefined.
Empty = Callable[[Sequence[int], torch.dtype], torch.Tensor]
#: The projections with an adapter, in the order in which their parameters lie.
MODULES = ("q", "k", "v", "o", "gate", "up", "down")
#: Their names in checkpoints.
_PATHS = {m: f"self_attn.{m}_proj" if m in "qkvo" else f"mlp.{m}_proj" for m in MODULES}
_PREFIX = "base_model.model."


def plain_empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of torch's own allocator."""
    return torch.empty(tuple(shape), dtype=dtype)


def seeded(*parts: int | str) -> torch.Generator:
    """A generator whose numbers depend on `parts` only."""
    digest = blake3("/".join(map(str, parts)).encode()).digest(8)
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def base_name(layer: int, module: str) -> str:
    """The name of the frozen matrix of `module`, as the base model's checkpoint has it."""
    return f"model.layers.{layer}.{_PATHS[module]}.weight"


def matrix_names(layer: int, module: str) -> tuple[str, str]:
    """The names of a module's A and B in a PEFT adapter's file."""
    path = _PREFIX + base_name(layer, module).removesuffix("weight")
    return f"{path}lora_A.weight", f"{path}lora_B.weight"


def target_modules() -> list[str]:
    """The modules' names, as PEFT's `target_modules` has them."""
    return [path.rpartition(".")[2] for path in _PATHS.values()]


def check_trainable(c: ModelConfig) -> None:
    """Raises ConfigError for a family whose layers are not trained here."""
    if c.experts is not None or c.gemma is not None:
        raise ConfigError(
            f"fine-tuning does not train {c.architecture}; train it elsewhere, merge the adapter, and serve the merged "
            "model"
        )
    if c.quantisation is not None:
        raise ConfigError(
            f"fine-tuning does not train quantised weights ({c.quantisation.method}); train the unquantised model"
        )


def module_widths(c: ModelConfig) -> dict[str, tuple[int, int]]:
    """Width of each module's input and output. Raises ConfigError, see `check_trainable`."""
    check_trainable(c)
    hidden, q, kv, mlp = c.hidden_size, c.heads * c.head_dim, c.kv_heads * c.head_dim, c.intermediate_size
    return {
        "q": (hidden, q),
        "k": (hidden, kv),
        "v": (hidden, kv),
        "o": (q, hidden),
        "gate": (hidden, mlp),
        "up": (hidden, mlp),
        "down": (mlp, hidden),
    }


@dataclass(frozen=True, slots=True)
class Shapes:
    """Where a layer's matrices lie in its vector: A `[rank, input]` and B `[output, rank]` of each module."""

    rank: int
    widths: dict[str, tuple[int, int]]

    @classmethod
    def of(cls, config: ModelConfig, rank: int) -> Shapes:
        """Of a model's layers."""
        return cls(rank, module_widths(config))

    @property
    def count(self) -> int:
        """Parameters of a layer."""
        return sum(self.rank * (i + o) for i, o in self.widths.values())

    def views(self, flat: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """A and B of each module: views of a layer's vector `flat [count]`."""
        found, at = {}, 0
        for module, (i, o) in self.widths.items():
            middle, end = at + self.rank * i, at + self.rank * (i + o)
            found[module] = flat[at:middle].view(self.rank, i), flat[middle:end].view(o, self.rank)
            at = end
        return found


class Adapter:
    """The parameters, float32 `[layers, count]`. scale: factor of every module's output, alpha / rank."""

    def __init__(self, config: ModelConfig, settings: Settings, empty: Empty = plain_empty) -> None:
        """A is drawn by `settings.seed`, B is 0, so that training begins with the base model."""

        self.shapes = Shapes.of(config, settings.rank)
        self.scale = settings.alpha / settings.rank
        self.flat = empty((config.layers, self.shapes.count), torch.float32)
        self.layers = [self.shapes.views(flat) for flat in self.flat]
        for number, layer in enumerate(self.layers):
            for module, (a, b) in layer.items():
                bound = 1 / math.sqrt(a.shape[1])  # kaiming_uniform_ with a = sqrt(5)
                a.uniform_(-bound, bound, generator=seeded(settings.seed, "A", number, module))
                b.zero_()

    def named(self) -> dict[str, torch.Tensor]:
        """The matrices by their names in a PEFT adapter's file; views."""
        found: dict[str, torch.Tensor] = {}
        for number, layer in enumerate(self.layers):
            for module, pair in layer.items():
                found |= zip(matrix_names(number, module), pair, strict=True)
        return found
