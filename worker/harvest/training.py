"""LoRA training, one optimizer step at a time, as units on lanes.

A step takes a batch of examples through the layers, one layer at a time for all of them, then through the head, and
back. Each example is a micro-batch. Gradients are those of the sum of the targets' cross-entropy; they are added in the
order of the batch, then divided by the number of targets of the batch, and clipped to a norm of 1. So neither lanes,
nor pauses, nor the times at which layers arrive change a bit.

Does not decide when it may compute (`worker.harvest.gate`), and stores nothing (`worker.harvest.checkpoints`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from contracts.errors import UpbeatError
from contracts.finetune import Settings
from runtime.model_config import ModelConfig
from worker.harvest.adapter import Adapter, Empty, Shapes, plain_empty
from worker.harvest.batches import Batches, learning_rate
from worker.harvest.data import Examples
from worker.harvest.gate import Frozen, Gate
from worker.harvest.head import HeadPass, HeadScratch
from worker.harvest.lanes import Chain, Lanes
from worker.harvest.lora import Dropout, Pass, Scratch
from worker.harvest.optimizer import Optimizer
from worker.harvest.partition import Partition
from worker.models.llama import RopeTable, embed
from worker.models.weights import LayerWeights, TopWeights


def trainer_bytes(
    config: ModelConfig,
    settings: Settings,
    training: Examples,
    validation: Examples | None,
    partition: Partition,
    itemsize: int,
    lanes: int,
) -> int:
    """What a trainer holds through `empty`, its adapter included: parameters, gradients and AdamW's state, inputs of
    layers, and the lanes' memory. itemsize: of the frozen weights' type. Units allocate more for milliseconds."""
    c, every = config, [training, *([validation] if validation else [])]
    longest, batch, micros = _most(settings, training, every)
    count, q, kv = Shapes.of(c, settings.rank).count, c.heads * c.head_dim, c.kv_heads * c.head_dim
    parameters = 4 * count * (c.layers * 4 + micros)
    inputs = itemsize * batch * c.hidden_size * (c.layers + 2)
    layer = longest * (itemsize * (2 * q + 2 * kv) + 4 * 2 * kv)
    head = partition.head_rows * ((itemsize + 4) * c.hidden_size + 4 * c.vocab_size)
    return parameters + inputs + lanes * (layer + head)


def _most(settings: Settings, training: Examples, every: Sequence[Examples]) -> tuple[int, int, int]:
    """Tokens of the longest example, and of the largest batch; micro-batches of a step."""
    batches = Batches(len(training), settings)
    longest = max(max(data.lengths) for data in every)
    return longest, max(batches.most_tokens(data.lengths) for data in every), min(settings.batch_size, len(training))


class TrainingFailed(UpbeatError):
    """Training cannot go on. The message says why, and what to change."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did. step: steps done, this one included. loss: mean cross-entropy of its targets, before the update.
    tokens: of its examples."""

    step: int
    loss: float
    tokens: int
    learning_rate: float
    gradient_norm: float


@dataclass(frozen=True, slots=True)
class _Micro:
    """An example of the batch under way. rows: its place in the batch's buffers."""

    tokens: torch.Tensor
    at: torch.Tensor
    labels: torch.Tensor
    rows: slice
    dropout: Dropout


class Trainer:
    """The state of a job: its adapter, the optimizer's, and the number of steps done."""

    def __init__(
        self,
        config: ModelConfig,
        settings: Settings,
        training: Examples,
        validation: Examples | None,
        frozen: Frozen,
        gate: Gate,
        partition: Partition,
        adapter: Adapter,
        lanes: int = 1,
        empty: Empty = plain_empty,
    ) -> None:
        """lanes: how many units may compute at the same time. empty: allocates what is held as long as the trainer is;
        see `trainer_bytes`."""
        self._config, self._settings, self._partition = config, settings, partition
        self._training, self._validation = training, validation
        self._frozen, self.adapter, self._empty = frozen, adapter, empty
        self._batches = Batches(len(training), settings)
        self.steps = self._batches.steps
        #: Steps done, and tokens of their examples.
        self.step, self.tokens = 0, 0
        self._dtype = frozen.top().embedding.dtype
        self._lanes = Lanes(lanes, gate)
        longest, batch, micros = _most(settings, training, [training, *([validation] if validation else [])])
        self.optimizer = Optimizer(adapter, settings, micros, self._lanes, empty)
        self._rope = RopeTable(config, self._dtype).at(torch.arange(longest), longest)
        # Of each layer, and of the head, for the examples of a batch.
        self._inputs = empty((config.layers + 1, batch, config.hidden_size), self._dtype)
        self._dx = empty((batch, config.hidden_size), self._dtype)
        self._scratch = deque(Scratch(config, longest, self._dtype, empty) for _ in range(lanes))
        self._head_scratch = deque(HeadScratch(config, partition.head_rows, self._dtype, empty) for _ in range(lanes))

    def close(self) -> None:
        """Ends its threads."""
        self._lanes.close()

    def train_step(self) -> StepResult:
        """Does one step. Raises Stopped, having changed nothing; TrainingFailed when loss or gradient are not
        finite."""
        rate = learning_rate(self._settings, self.step, self.steps)
        batch = self._micros(self._training, self._batches.at(self.step), self._settings.dropout)
        self._forward(batch, keep=True)
        loss = self._head(batch, backward=True)
        targets = sum(len(micro.labels) for micro in batch)
        grads = self.optimizer.gradients(len(batch))
        for layer in reversed(range(self._config.layers)):
            self._backward(layer, batch, grads)
            self.optimizer.add(layer, len(batch), targets)
        norm = self.optimizer.norm()
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise TrainingFailed(
                f"step {self.step + 1}: the loss is {loss}, the gradient's norm {norm}; lower learning_rate"
            )
        tokens = sum(len(micro.tokens) for micro in batch)
        done = StepResult(self.step + 1, loss / targets, tokens, rate, norm)
        self.optimizer.update(rate, norm)
        self.step, self.tokens = self.step + 1, self.tokens + tokens
        return done

    def validation_loss(self) -> float:
        """Mean cross-entropy of the validation examples' targets, without dropout; NaN without examples. Raises
        Stopped."""
        if self._validation is None:
            return math.nan
        loss, targets, size = 0.0, 0, self._settings.batch_size
        for first in range(0, len(self._validation), size):
            batch = self._micros(self._validation, range(first, min(first + size, len(self._validation))), 0.0)
            self._forward(batch, keep=False)
            loss += self._head(batch, backward=False)
            targets += sum(len(micro.labels) for micro in batch)
        return loss / targets

    def _micros(self, data: Examples, examples: Sequence[int], dropout: float) -> list[_Micro]:
        batch, first = [], 0
        for example in examples:
            tokens = data.tokens(example)
            rows = slice(first, first + len(tokens))
            mask = Dropout(dropout, (self._settings.seed, self.step, example))
            batch.append(_Micro(tokens, *data.targets(example), rows, mask))
            first = rows.stop
        return batch

    def _forward(self, batch: list[_Micro], keep: bool) -> None:
        """From the tokens to the last layer's output. keep: keeps all inputs of layers."""
        layers = self._config.layers
        # Otherwise two buffers take turns, and the head's is the first.
        inputs = [self._inputs[n if keep else (layers - n) % 2] for n in range(layers + 1)]

        def embedded(micro: _Micro) -> Chain[TopWeights]:
            def unit(top: TopWeights) -> None:
                inputs[0][micro.rows] = embed(top, self._config, micro.tokens)

            yield unit

        self._lanes.run([embedded(micro) for micro in batch], self._frozen.top)
        for layer in range(layers):
            chains = [self._forward_of(layer, micro, inputs[layer], inputs[layer + 1]) for micro in batch]
            self._layer(layer, True, chains)

    def _layer(self, layer: int, forward: bool, chains: list[Chain[LayerWeights]]) -> None:
        self._frozen.next(layer, forward)
        self._lanes.run(chains, lambda: self._frozen.acquire(layer), lambda: self._frozen.release(layer))

    def _pass(self, layer: int, micro: _Micro) -> Pass:
        return Pass(
            self._config,
            layer,
            self._rope,
            self._partition.rows,
            self.adapter.layers[layer],
            self.adapter.scale,
            micro.dropout,
        )

    def _forward_of(self, layer: int, micro: _Micro, x: torch.Tensor, out: torch.Tensor) -> Chain[LayerWeights]:
        scratch = self._scratch.pop()
        try:
            yield from self._pass(layer, micro).forward(x[micro.rows], out[micro.rows], scratch)
        finally:
            self._scratch.append(scratch)

    def _backward(self, layer: int, batch: list[_Micro], grads: torch.Tensor) -> None:
        def chain(micro: _Micro, grad: torch.Tensor) -> Chain[LayerWeights]:
            scratch = self._scratch.pop()
            try:
                grad.zero_()
                x, dx = self._inputs[layer][micro.rows], self._dx[micro.rows]
                yield from self._pass(layer, micro).backward(x, dx, self.adapter.shapes.views(grad), scratch)
            finally:
                self._scratch.append(scratch)

        self._layer(layer, False, [chain(micro, grad) for micro, grad in zip(batch, grads, strict=True)])

    def _head(self, batch: list[_Micro], backward: bool) -> float:
        """Sum of the targets' cross-entropy; with `backward`, its gradient goes to `_dx`."""
        losses: list[list[float]] = [[] for _ in batch]
        last = self._inputs[-1] if backward else self._inputs[0]

        def chain(micro: _Micro, found: list[float]) -> Chain[TopWeights]:
            scratch = self._head_scratch.pop()
            try:
                way = HeadPass(self._config, micro.at, micro.labels, self._partition.head_rows, self._partition.columns)
                dx = self._dx[micro.rows] if backward else None
                yield from way.loss(last[micro.rows], found, scratch, dx)
            finally:
                self._head_scratch.append(scratch)

        self._lanes.run([chain(micro, found) for micro, found in zip(batch, losses, strict=True)], self._frozen.top)
        return math.fsum(loss for found in losses for loss in found)
