"""What `upbeat profile --corun` would measure on the simulated device: the paper's steps (section 8.8), alone and
beside training, with the device's noise. The fits are production's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from bench.harli.devices import Pair
from contracts.corun import CorunFit
from loadtest.simulate.events import Events
from loadtest.simulate.harvested import HarvestedGpu, Splitting
from loadtest.simulate.training import Training
from worker.core.fit_steps import Measurement, fit
from worker.core.harvest import Split

#: Sequences, and tokens of each.
RUNNING, EACH = (4, 16, 64), (64, 256, 512)
#: Steps beside training that a measurement is the mean of: forward and backward units differ.
_STEPS = 16


class Held(Splitting):
    """Always the same split."""

    def __init__(self, split: Split) -> None:
        self.split = split

    def plan(self, now: float, batch: int, tokens: int, prefill_tokens: int, target_s: float) -> Split:
        """See Splitting."""
        return self.split

    def stepped(self, now: float, seconds: float) -> None:
        """See Splitting."""

    def rest(self, now: float) -> Split:
        """See Splitting."""
        return self.split

    def starved(self, now: float, starved: bool) -> None:
        """See Splitting."""


def splits(shares: int) -> list[Split]:
    """All: 45 of ten parts."""
    return [Split(i, t) for i in range(1, shares) for t in range(1, shares - i + 1)]


def measured(pair: Pair, seed: int) -> Iterator[Measurement]:
    """The paper's measurements."""
    kind, dice = pair.kind, random.Random(seed)
    for infer in range(1, kind.shares + 1):
        gpu = _device(pair, Held(Split(infer, 0)), None, dice)
        for running in RUNNING:
            for each in EACH:
                seconds, _ = gpu.compute(Split(infer, 0), running, running * each)
                yield Measurement(infer, 0, running, running * each, seconds)
    for split in splits(kind.shares):
        gpu = _device(pair, Held(split), pair.training(all_here=True), dice)
        for running in RUNNING:
            for each in EACH:
                seen = [gpu.compute(split, running, running * each) for _ in range(_STEPS)]
                seconds = sum(took_s for took_s, _ in seen) / _STEPS
                trained = sum(tokens for _, tokens in seen) / (_STEPS * seconds)
                yield Measurement(*split, running, running * each, seconds, trained_tokens_s=trained)


def _device(pair: Pair, splitting: Splitting, training: Training | None, dice: random.Random) -> HarvestedGpu:
    return HarvestedGpu(pair.kind, Events(), splitting, training, dice.randrange(1 << 30))


def profile(pair: Pair, seed: int, rates: bool = False) -> CorunFit:
    """The fits. rates: with training's speed in each split, which production's choice uses; else the paper's rule."""
    steps = list(measured(pair, seed))
    if not rates:
        steps = [replace(m, trained_tokens_s=0.0) for m in steps]
    return fit(pair.kind.shares, steps)
