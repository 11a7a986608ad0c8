"""Measures the runner's steps for every batch and context length of a grid, on pages of an unused cache.

The time does not depend on the contents of pages. Sequences have separate pages while the cache has enough, because
decoding is bound by reading them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from contracts.latency_profile import Surface
from runtime.clock import Clock
from worker.devices.runner import Slice, Steps
from worker.memory.paged_kv import PagedKv


@dataclass(frozen=True, slots=True)
class Grid:
    """Points to measure, and repetitions: until there are `most` or `limit_s` has passed, at least one."""

    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    contexts: tuple[int, ...] = (128, 1024, 4096)
    tokens: tuple[int, ...] = (16, 64, 256, 512, 1024)
    before: tuple[int, ...] = (0, 1024, 4096)
    most: int = 5
    limit_s: float = 1.5

    def within(self, max_batch: int, step_tokens: int, max_tokens: int) -> Grid:
        """The part of the grid that a worker with these limits can run; never empty."""

        def upto(values: tuple[int, ...], most: int) -> tuple[int, ...]:
            return tuple(v for v in values if v <= most) or (most,)

        tokens = upto(self.tokens, min(step_tokens, max_tokens))
        contexts = upto(self.contexts, max_tokens - 1)
        return Grid(
            upto(self.batches, max_batch),
            contexts,
            tokens,
            upto(self.before, max_tokens - tokens[-1]),
            self.most,
            self.limit_s,
        )


QUICK = Grid(batches=(1, 8), contexts=(128, 1024), tokens=(16, 256), before=(0, 1024), most=3, limit_s=0.5)
#: What a worker without a profile measures before it serves.
BRIEF = Grid(batches=(1, 8), contexts=(1024,), tokens=(128,), before=(0, 1024), most=2, limit_s=0.2)


@dataclass(frozen=True, slots=True)
class Computed:
    """The surfaces of `contracts.latency_profile.Profile`."""

    decode_step_s: Surface
    decode_layer_s: Surface
    prefill_step_s: Surface
    prefill_layer_s: Surface


class Stopwatch:
    """Times steps of `runner`. Overwrites the first `pages` pages of `kv`, which must be mapped."""

    def __init__(self, runner: Steps, kv: PagedKv, pages: int, clock: Clock) -> None:
        # On an asynchronous device the hooks run when a layer is queued, not when it computes.
        self._hooks_follow = kv.memory.device.type == "cpu"
        self._runner, self._kv, self._pages, self._clock = runner, kv, pages, clock

    def slices(self, batch: int, tokens: int, context: int) -> list[Slice]:
        """`batch` sequences that compute `tokens` each after `context`, with separate pages while there are enough."""
        layers, chunks = self._kv.shape.layers, -(-(context + tokens) // self._kv.shape.chunk_tokens)
        made = []
        for n in range(batch):
            numbers = np.arange(n * layers * chunks, (n + 1) * layers * chunks, dtype=np.int64) % self._pages
            made.append(Slice([1] * tokens, context, numbers.reshape(layers, chunks), True))
        return made

    def step(self, slices: list[Slice]) -> tuple[float, float]:
        """(seconds of one step, seconds of one of its layers)."""
        began: list[float] = []
        start = self._clock.now()
        self._runner.step(slices, lambda layer: began.append(self._clock.now()), lambda layer: None)
        seconds = self._clock.now() - start
        # Intervals between layers' starts, without the last layer, which computes less in a prefill.
        between = [b - a for a, b in pairwise(began)]
        if not self._hooks_follow:
            return seconds, seconds / self._kv.shape.layers
        return seconds, statistics.median(between) if between else seconds

    def median(self, slices: list[Slice], most: int, limit_s: float) -> tuple[float, float]:
        """Medians of `step` over several steps. The first counts only if it exceeds `limit_s`."""
        first = self.step(slices)
        if first[0] > limit_s:
            return first
        taken = [self.step(slices)]
        while len(taken) < most and sum(s for s, _ in taken) < limit_s:
            taken.append(self.step(slices))
        return statistics.median(s for s, _ in taken), statistics.median(s for _, s in taken)


def on_free_pages(runner: Steps, kv: PagedKv, grid: Grid, clock: Clock, say: Callable[[str], None]) -> Computed:
    """Measure the grid on as many slabs of `kv` as it needs or are free. Maps and unmaps them; none may be mapped."""
    tokens = max(grid.batches[-1] * (grid.contexts[-1] + 1), grid.before[-1] + grid.tokens[-1])
    chunks = -(-tokens // kv.shape.chunk_tokens) + grid.batches[-1]
    slabs = min(-(-chunks * kv.shape.layers // kv.pages_per_slab), kv.slab_count, kv.memory.free // kv.slab_granules)
    for slab in range(slabs):
        kv.map_slab(slab)
    try:
        kv.view[:slabs].zero_()  # Fault pages in before anything is timed.
        return compute(Stopwatch(runner, kv, slabs * kv.pages_per_slab, clock), grid, say)
    finally:
        for slab in range(slabs):
            kv.unmap_slab(slab)


def compute(watch: Stopwatch, grid: Grid, say: Callable[[str], None]) -> Computed:
    """Measure the grid; `say` gets a line per row."""

    def surfaces(
        what: str, rows: Sequence[int], columns: Sequence[int], made: Callable[[int, int], list[Slice]]
    ) -> tuple[Surface, Surface]:
        steps, layers = [], []
        for row in rows:
            taken = [watch.median(made(row, column), grid.most, grid.limit_s) for column in columns]
            steps.append([s for s, _ in taken])
            layers.append([s for _, s in taken])
            after = ", ".join(
                f"{1000 * s:.1f} ms after {column}" for (s, _), column in zip(taken, columns, strict=True)
            )
            say(f"{what} {row}: {after}")
        return Surface.measured(rows, columns, steps), Surface.measured(rows, columns, layers)

    decode = surfaces(
        "decode, batch", grid.batches, grid.contexts, lambda batch, context: watch.slices(batch, 1, context)
    )
    prefill = surfaces(
        "prefill, tokens", grid.tokens, grid.before, lambda tokens, context: watch.slices(1, tokens, context)
    )
    return Computed(decode[0], decode[1], prefill[0], prefill[1])
