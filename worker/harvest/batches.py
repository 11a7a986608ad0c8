"""Which examples a step trains on, and how fast it learns: functions of the settings and the step only."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from contracts.finetune import Settings
from worker.harvest.adapter import seeded


class Batches:
    """The batches of `count` examples: in each epoch all of them, in an order drawn by seed and epoch."""

    def __init__(self, count: int, settings: Settings) -> None:
        self._count, self._size, self._seed = count, settings.batch_size, settings.seed
        self._per_epoch = -(-count // settings.batch_size)
        #: Steps of the whole job.
        self.steps = self._per_epoch * settings.epochs
        self._order: tuple[int, list[int]] = (-1, [])

    def at(self, step: int) -> list[int]:
        """The examples of `step` (from 0), in the order in which their gradients are added."""
        epoch, within = divmod(step, self._per_epoch)
        if self._order[0] != epoch:
            drawn = torch.randperm(self._count, generator=seeded(self._seed, "order", epoch))
            self._order = epoch, drawn.tolist()
        return self._order[1][within * self._size : (within + 1) * self._size]

    def most_tokens(self, lengths: Sequence[int]) -> int:
        """A bound of the tokens of a batch, given the examples' `lengths`."""
        return sum(sorted(lengths)[-self._size :])


def learning_rate(settings: Settings, step: int, steps: int) -> float:
    """The rate of `step` (from 0) of `steps`: rises linearly over the first `warmup_ratio` of the steps, then falls
    linearly, to 0 after the last one."""
    warmup = math.ceil(settings.warmup_ratio * steps)
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    return settings.learning_rate * (steps - step) / max(1, steps - warmup)
