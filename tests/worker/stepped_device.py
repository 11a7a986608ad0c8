"""A device of some units whose steps take what a roofline says: memory bandwidth is shared with training, computing is
by units. It is not of the form that is fitted to it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from worker.core.fit_steps import Measurement


@dataclass(frozen=True)
class SteppedDevice:
    """weights_s: to read all weights; token_s: to compute a sequence's token with all units; context_s: to read a
    token's KV; pull: part of the bandwidth that a unit of training asks for. noise: relative, of each step."""

    shares: int = 4
    weights_s: float = 0.012
    token_s: float = 0.0006
    context_s: float = 4e-7
    pull: float = 0.2
    noise: float = 0.0

    def seconds(self, infer: int, training: int, batch: int, tokens: int, prefill_tokens: int = 0) -> float:
        # A unit alone reaches 0.6 of the bandwidth; two reach it all.
        reach = min(0.6 * infer, 1.0)
        asked = reach + self.pull * training
        read_s = (self.weights_s + tokens * self.context_s) / reach * max(asked, 1.0)
        return 0.0005 + read_s + (batch + prefill_tokens) * self.token_s * self.shares / infer

    def noisy(self, rng: random.Random, infer: int, training: int, batch: int, tokens: int, prefill: int = 0) -> float:
        return self.seconds(infer, training, batch, tokens, prefill) * (1 + self.noise * rng.uniform(-1, 1))

    def measured(self, seed: int = 0) -> list[Measurement]:
        rng = random.Random(seed)
        return [
            Measurement(
                infer, training, batch, tokens, self.noisy(rng, infer, training, batch, tokens, prefill), prefill
            )
            for infer, training, batch, tokens, prefill in self.steps()
        ]

    def steps(self) -> Iterator[tuple[int, int, int, int, int]]:
        for infer in range(1, self.shares + 1):
            for training in range(self.shares - infer + 1):
                for batch in (1, 4, 16, 64):
                    for each in (64, 512):
                        yield infer, training, batch, batch * each, 0
                if not training:
                    yield infer, 0, 4, 1024, 64
