"""Measures decode steps by part of the device, alone and beside a real trainer (HARLI, section 5; `upbeat profile
--corun`).

The trainer trains the measured model on text made for it, and stops between points. Points alternate between splits, so
that a slow stretch of the machine hits all of them. Each point is visited several times, in a drawn order: a step of
training takes seconds, and its parts slow inference unequally.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from contracts.corun import CorunFit
from contracts.errors import ConfigError
from contracts.finetune import Job, Settings
from runtime.clock import RealClock
from worker.core.fit_steps import Measurement, fit
from worker.core.granules import Owner, Use
from worker.devices.device import Device
from worker.devices.partition import Partition
from worker.devices.runner import Steps
from worker.engine.training.trainer_process import TrainerProcess
from worker.harvest import wire
from worker.harvest.words import Word
from worker.measure.steps import Stopwatch
from worker.memory.paged_kv import PagedKv
from worker.models.load import Model

#: Shares of inference that are measured at most (HARLI: 10).
_MOST_SHARES = 10
#: The trainer's job: examples, words of each, and settings. Steps are short; units are those of any job.
_EXAMPLES, _WORDS, _SETTINGS = 4, 400, Settings(epochs=1000, batch_size=2, max_tokens=256, checkpoint_every=1_000_000)
#: Wait for the trainer's first step, for its units to end, and after a change of the split, in seconds.
_BEGIN_S, _UNIT_S, _SETTLE_S = 300.0, 1.0, 0.03


@dataclass(frozen=True, slots=True)
class CorunGrid:
    """Points to measure. Held-out ones judge the fit. prompts: tokens of a prefill step. Steps a visit: until there are
    `most` or `limit_s` has passed, at least three."""

    batches: tuple[int, ...] = (1, 4, 8, 16, 32, 64)
    contexts: tuple[int, ...] = (128, 512, 1024)
    held_out: tuple[tuple[int, int], ...] = ((2, 256), (6, 768), (12, 256), (24, 384), (48, 640))
    prompts: tuple[int, ...] = (64, 256)
    visits: int = 4
    most: int = 5
    limit_s: float = 1.0


QUICK_CORUN = CorunGrid((1, 4, 16), (128, 512), ((2, 256), (12, 384)), (64,), 1, 5, 0.5)


class _Point(NamedTuple):
    """A step to measure: `tokens` for each of `batch` sequences after `context`."""

    batch: int
    tokens: int
    context: int

    def __str__(self) -> str:
        return f"a prompt of {self.tokens}" if self.tokens > 1 else f"batch {self.batch} after {self.context}"


@dataclass(slots=True)
class _Seen:
    """What visits of a point with one split have measured: steps' seconds, and trained tokens and seconds in all."""

    steps: list[float] = field(default_factory=list)
    trained: float = 0.0
    span_s: float = 0.0

    def measurement(self, split: tuple[int, int], point: _Point) -> Measurement:
        """The median step."""
        batch, tokens, context = point
        seconds = statistics.median(self.steps)
        if tokens > 1:
            return Measurement(*split, 0, 0, seconds, tokens)
        rate = self.trained / self.span_s if split[1] else 0.0
        return Measurement(*split, batch, batch * (context + 1), seconds, 0, rate)


def measure_corun(
    model: Model,
    directory: Path,
    kv: PagedKv,
    runner: Steps,
    device: Device,
    digests: Path,
    grid: CorunGrid,
    max_batch: int,
    say: Callable[[str], None],
) -> CorunFit:
    """Measure and fit. No slab of `kv` may be mapped. Raises ConfigError where the device cannot be divided, or the
    model not trained."""
    partition = device.partition
    if partition is None or not partition.divisible:
        raise ConfigError(
            "--corun: the device cannot be divided between serving and training: the compiled CPU kernels need at "
            "least two threads; raise worker.threads, or profile without --corun"
        )
    with (
        tempfile.TemporaryDirectory(prefix="upbeat-corun-") as made,
        _trainer(model, directory, device, digests, Path(made), partition) as trainer,
        _pages(kv, grid, max_batch) as pages,
    ):
        return _Measuring(Stopwatch(runner, kv, pages, RealClock()), partition, trainer, grid, max_batch, say).all()


class _Trainer:
    """A trainer that can be let and held."""

    def __init__(self, process: TrainerProcess, woken: threading.Event) -> None:
        self.process, self._woken = process, woken
        self.units_a_token = 0.0

    def hear(self, kind: type[wire.Message], seconds: float) -> wire.Message:
        """Wait for such a message. Raises ConfigError when the trainer ends, or says nothing for so long."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._woken.clear()
            for message in self.process.take():
                if isinstance(message, wire.Ended):
                    raise ConfigError(f"--corun: the trainer ended: {message.error or message.how}")
                if isinstance(message, kind):
                    return message
            if self.process.ended:
                raise ConfigError("--corun: the trainer crashed")
            self._woken.wait(0.1)
        raise ConfigError(f"--corun: the trainer said nothing for {seconds:.0f} s")

    def rest(self) -> None:
        """Hold it, and wait until no unit runs."""
        self.process.let(0)
        until = time.monotonic() + _UNIT_S
        while any(self.process.words[Word.BEGAN_NS + lane] for lane in range(64)) and time.monotonic() < until:
            time.sleep(1e-3)

    def tokens(self) -> float:
        """Tokens trained so far, by its units."""
        return self.process.words[Word.UNITS] / self.units_a_token if self.units_a_token else 0.0


@contextmanager
def _trainer(
    model: Model, directory: Path, device: Device, digests: Path, made: Path, partition: Partition
) -> Iterator[_Trainer]:
    """Trains `model` in the background, all its layers in memory."""
    memory, woken = device.memory, threading.Event()
    data = made / "data.jsonl"
    text = " ".join(f"number {n} is {n * n % 97}" for n in range(_WORDS // 4))
    data.write_text("".join(json.dumps({"text": f"{n} {text}"}) + "\n" for n in range(_EXAMPLES)))
    job = Job("ftjob-profiling", "", "profiling", str(data), str(made / "out"), settings=_SETTINGS)
    begin = wire.Begin(asdict(job), str(directory), str(digests), partition.dtype(model.dtype), partition.shares)
    process = TrainerProcess(begin, memory, Owner(Use.TRAINER, job.id), made / "trainer.log", woken.set)
    trainer = _Trainer(process, woken)
    try:
        process.let(partition.shares)
        needs = trainer.hear(wire.Needs, _BEGIN_S)
        assert isinstance(needs, wire.Needs)
        process.grant_top(-(-needs.top_bytes // memory.granule_bytes))
        layer = -(-needs.layer_bytes // memory.granule_bytes)
        for _ in range(min(needs.layers, memory.free // 2 // layer)):
            process.grant(layer)
        stepped = [trainer.hear(wire.Stepped, _BEGIN_S) for _ in range(2)]
        units = process.words[Word.UNITS]
        stepped.append(trainer.hear(wire.Stepped, _BEGIN_S))
        first, last = stepped[-2], stepped[-1]
        assert isinstance(first, wire.Stepped) and isinstance(last, wire.Stepped)
        trainer.units_a_token = (process.words[Word.UNITS] - units) / (last.tokens - first.tokens)
        yield trainer
    finally:
        process.end()


@contextmanager
def _pages(kv: PagedKv, grid: CorunGrid, max_batch: int) -> Iterator[int]:
    """Pages for the largest point, as far as memory reaches."""
    chunks = -(-min(grid.batches[-1], max_batch) * grid.contexts[-1] // kv.shape.chunk_tokens) + grid.batches[-1]
    wanted = -(-chunks * kv.shape.layers // kv.pages_per_slab)
    slabs = min(wanted, kv.slab_count, kv.memory.free // kv.slab_granules)
    for slab in range(slabs):
        kv.map_slab(slab)
    try:
        kv.view[:slabs].zero_()
        yield slabs * kv.pages_per_slab
    finally:
        for slab in range(slabs):
            kv.unmap_slab(slab)


class _Measuring:
    def __init__(
        self,
        watch: Stopwatch,
        partition: Partition,
        trainer: _Trainer,
        grid: CorunGrid,
        max_batch: int,
        say: Callable[[str], None],
    ) -> None:
        self._watch, self._partition, self._trainer = watch, partition, trainer
        self._grid, self._max_batch, self._say = grid, max_batch, say
        shares = partition.shares
        count = min(shares - 1, _MOST_SHARES - 1)
        infer = sorted({max(round(shares * n / (count + 1)), 1) for n in range(1, count + 1)})
        #: (infer, training): alone with each share, then beside the trainer.
        self._splits = [*((n, 0) for n in [*infer, shares]), *((n, shares - n) for n in infer)]

    def all(self) -> CorunFit:
        """Measure every point at every split, and fit."""
        grid, dice = self._grid, random.Random(1)
        fitted = [_Point(b, 1, c) for b in grid.batches if b <= self._max_batch for c in grid.contexts]
        fitted += [_Point(1, tokens, 0) for tokens in grid.prompts]
        judged = [_Point(b, 1, c) for b, c in grid.held_out if b <= self._max_batch]
        seen = {(split, point): _Seen() for point in (*fitted, *judged) for split in self._splits}
        for visit in range(grid.visits):
            points = [*fitted, *judged]
            for point in dice.sample(points, len(points)):
                for split in self._splits:
                    self._visit(seen[split, point], split, point)
                medians = (
                    f"{1e3 * statistics.median(seen[s, point].steps):.1f} ms with {s[0]}+{s[1]}" for s in self._splits
                )
                self._say(f"corun {visit + 1}/{grid.visits}, {point}: {', '.join(medians)}")
        self._trainer.rest()
        self._partition.use(self._partition.shares)
        measured, held_out = (
            [seen[split, point].measurement(split, point) for point in points for split in self._splits]
            for points in (fitted, judged)
        )
        return fit(self._partition.shares, measured, held_out)

    def _visit(self, seen: _Seen, split: tuple[int, int], point: _Point) -> None:
        infer, training = split
        self._partition.use(infer)
        if training:
            self._trainer.process.let(training, self._partition.others(infer, training))
        else:
            self._trainer.rest()
        time.sleep(_SETTLE_S)
        slices = self._watch.slices(*point)
        began_s, began = time.monotonic(), self._trainer.tokens()
        times = [self._watch.step(slices)[0] for _ in range(3)]
        while len(times) < self._grid.most and sum(times) < self._grid.limit_s:
            times.append(self._watch.step(slices)[0])
        seen.steps += times
        seen.trained += self._trainer.tokens() - began
        seen.span_s += time.monotonic() - began_s
        self._trainer.process.take()
