"""How long decode steps and training take that share a GPU (HARLI, section 5.2.2). Decides nothing.

A roofline for each, by its part of the GPU's processors, and equations (4) and (5) for the memory both read: where they
ask for more than there is, each is as many times slower. Nothing here has the form of the predictor's equations (2) and
(3), so that its errors are real.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from loadtest.simulate.costs import Device, ModelShape


@dataclass(frozen=True, slots=True)
class SharedGpu:
    """A GPU whose processors can be divided. steep: of its memory's rate a part s of the processors reaches
    `s (1 + steep) / (s + steep)`. train_mfu: part of peak flops that training reaches. pulls_forward, pulls_backward:
    part of the memory's rate that training asks for with all processors. copy_bytes_per_s: from host memory. sharp: a
    step takes this norm of its memory and compute times (infinite: the longer one)."""

    device: Device
    steep: float
    train_mfu: float
    pulls_forward: float
    pulls_backward: float
    copy_bytes_per_s: float
    sharp: float = 6.0

    @property
    def bytes_per_s(self) -> float:
        """Of its memory, as reached."""
        return self.device.memory_bytes_per_s * self.device.mbu

    def reached(self, part: float) -> float:
        """Part of the memory's rate that `part` of the processors reaches."""
        return part * (1 + self.steep) / (part + self.steep)

    def step_s(self, part: float, bytes_: float, flops: float) -> float:
        """A step alone, on `part` of the processors."""
        read_s = bytes_ / (self.bytes_per_s * self.reached(part))
        compute_s = flops / (self.device.flops * self.device.mfu * part)
        return self.device.overhead_s + math.pow(read_s**self.sharp + compute_s**self.sharp, 1 / self.sharp)

    def train_s(self, part: float, flops: float) -> float:
        """Training's `flops` alone, on `part` of the processors."""
        return flops / (self.device.flops * self.train_mfu * part)

    def pulled(self, part: float, forward: bool) -> float:
        """Bytes a second that training asks for, on `part` of the processors."""
        return self.bytes_per_s * part * (self.pulls_forward if forward else self.pulls_backward)

    def slower(self, *asked_bytes_per_s: float) -> float:
        """How many times as long each takes (equation 5)."""
        return max(sum(asked_bytes_per_s) / self.bytes_per_s, 1.0)


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """Bytes and flops of decode steps of a model; devices: it is divided over so many, and a step then takes `join_s`
    longer."""

    shape: ModelShape
    devices: int = 1
    join_s: float = 0.0

    def bytes_(self, tokens: float) -> float:
        """That a device reads in a step, `tokens` of context in all."""
        return (self.shape.weight_bytes + tokens * self.shape.token_bytes) / self.devices

    def flops(self, sequences: int, tokens: float) -> float:
        """Of a step, on a device."""
        attention = 4.0 * self.shape.layers * self.shape.heads * self.shape.head_dim * tokens
        return (2.0 * self.shape.parameters * sequences + attention) / self.devices


@dataclass(frozen=True, slots=True)
class TrainWork:
    """LoRA of a model, a layer a unit. rows: tokens of a unit, an example. examples: computed by a layer before the
    next one. vocabulary: of the model. LoRA's own products are not counted."""

    shape: ModelShape
    vocabulary: int
    rows: int = 1024
    examples: int = 2

    @property
    def hidden(self) -> int:
        """Width of the model."""
        return self.shape.heads * self.shape.head_dim

    @property
    def layer_parameters(self) -> float:
        """Of a layer, without embeddings."""
        return (self.shape.parameters - 2.0 * self.vocabulary * self.hidden) / self.shape.layers

    @property
    def layer_bytes(self) -> float:
        """Of a frozen layer."""
        return self.layer_parameters * self.shape.type_bytes

    @property
    def fixed_bytes(self) -> float:
        """What stays: embeddings and head, saved inputs of layers, a unit's activations and logits, trained weights
        with their optimizer (rank 8)."""
        kept = 2.0 * self.vocabulary * self.hidden * self.shape.type_bytes
        inputs = float(self.shape.layers * self.examples * self.rows * self.hidden * self.shape.type_bytes)
        unit = self.rows * (40.0 * self.hidden * self.shape.type_bytes + 4.0 * self.vocabulary)
        trained = self.shape.layers * 8 * 24.0 * self.hidden * 14
        return kept + inputs + unit + trained

    def unit_flops(self, forward: bool) -> float:
        """A layer's: forward, or computed again and backward to its input."""
        attention = 2.0 * self.rows * self.rows * self.hidden
        once = 2.0 * self.layer_parameters * self.rows + attention
        return once if forward else 2.0 * once

    @property
    def head_flops(self) -> float:
        """Logits and back, of an example."""
        return 4.0 * self.vocabulary * self.hidden * self.rows

    @property
    def example_flops(self) -> float:
        """All of an example's."""
        return self.shape.layers * (self.unit_flops(True) + self.unit_flops(False)) + self.head_flops
