"""Runs one step of the engine: builds the batch's slices and waits for layers that are still being loaded.

Later layers are copied while earlier ones compute. A piece that does not arrive voids only its sequence's part of the
step, and a sequence on which the step raises fails alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from runtime import telemetry
from worker.core.block import Block
from worker.core.instructions import Coming, Step
from worker.core.progress import Progress
from worker.core.sequence import Sequence
from worker.core.token_counts import Row
from worker.devices.runner import Slice, Steps
from worker.engine import failpoints
from worker.engine.executor import Executor
from worker.link.loads import StepProgress

log = telemetry.logger("worker.engine.stepping")
Batch = list[tuple[Sequence, int]]
Arriving = Mapping[str, list[Coming]]
#: A layer that has not arrived after this long is lost, in seconds.
LAYER_TIMEOUT_S = 10.0


class _Table:
    """Pages of one sequence's blocks, int64 `[layers, blocks]`, cached while it runs: its list of blocks only grows,
    and a block in use keeps the pages that are read, unless they move (`instructions.MovePages`). Others are out of
    date where it lost or got them."""

    def __init__(self, blocks: list[Block], layers: int) -> None:
        self.blocks = blocks
        self._pages = np.empty((layers, max(2 * len(blocks), 8)), np.int64)
        self._filled = 0

    def upto(self, count: int) -> np.ndarray:
        """Pages of the first `count` blocks; read-only."""
        if count > self._pages.shape[1]:
            self._pages = np.concatenate((self._pages, np.empty((len(self._pages), count), np.int64)), axis=1)
        for index in range(self._filled, count):
            self._pages[:, index] = self.blocks[index].pages
        self._filled = max(self._filled, count)
        return self._pages[:, :count]


class Beside(Protocol):
    """Who shares the device's processors with steps (`worker.engine.training`)."""

    @property
    def active(self) -> bool:
        """Whether it wants to know of steps now."""
        ...

    def before(self, model: str, batch: int, tokens: int, prefill_tokens: int) -> None:
        """A step begins: `batch` sequences get a token after `tokens` in all, and so many tokens are prefilled."""
        ...

    def after(self, model: str, seconds: float, batch: int) -> None:
        """The step took so long."""
        ...


@dataclass(slots=True)
class Outcome:
    """A step's result, by request id. rows: logits, float32 `[vocab]`, of sequences whose tokens are all computed.
    void: layers did not arrive. failed: exceptions of sequences that failed. seconds: duration of the step. stalled_s:
    part of it spent waiting for layers. attempts: number of runs of the model."""

    rows: dict[str, Row] = field(default_factory=dict)
    void: set[str] = field(default_factory=set)
    failed: dict[str, Exception] = field(default_factory=dict)
    seconds: float = 0.0
    stalled_s: float = 0.0
    attempts: int = 0


@dataclass(slots=True)
class Stepping:
    """Runs steps on `runner`. Engine thread only."""

    executor: Executor
    runner: Steps
    model: str = ""
    beside: Beside | None = None
    #: Updated at every layer.
    beats: Progress = field(default_factory=Progress)
    #: Page tables of the last step's sequences, and how often pages had moved then.
    _tables: dict[Sequence, _Table] = field(default_factory=dict)
    _moves: int = 0

    def run(self, step: Step, progress: StepProgress | None = None) -> Outcome:
        """Compute the step. Does not change its sequences.

        progress: updated at each layer whose KV is written. A step that raises is rerun in halves, down to the single
        sequences on which it raises: those fail. If it raises on all of them and on a harmless token too, the device is
        at fault, and the first error is raised.
        """
        outcome, batch = Outcome(), list(step.batch)
        decodes = self._announce(batch)
        began = self.executor.clock.now()
        self.beats.step(began, step.expected_s)
        self._run(batch, step.coming, progress, outcome)
        ended = self.executor.clock.now()
        self.beats.stepped(ended)
        outcome.seconds = ended - began
        if self.beside is not None:
            self.beside.after(self.model, outcome.seconds - outcome.stalled_s, decodes)
        if len(outcome.failed) == len(batch):
            self._probe(*batch[0], next(iter(outcome.failed.values())))
        if outcome.failed and progress is not None:
            progress.reached(self.executor.shape.layers)  # saves must not wait for layers of failed sequences
        return outcome

    def _announce(self, batch: Batch) -> int:
        """Tell `beside` of a step. Returns the number of its decodes."""
        if self.beside is None or not self.beside.active:
            return 0
        decodes = [s for s, count in batch if count == 1 and s.computed + 1 == len(s.tokens)]
        tokens = sum(len(s.tokens) for s in decodes)
        self.beside.before(self.model, len(decodes), tokens, sum(count for _, count in batch) - len(decodes))
        return len(decodes)

    def _run(self, batch: Batch, coming: Arriving, progress: StepProgress | None, outcome: Outcome) -> None:
        outcome.attempts += 1
        try:
            logits, void = self._attempt(batch, coming, progress, outcome)
        except Exception as error:
            if len(batch) == 1:
                log.exception("a step raised", request=batch[0][0].request.request_id)
                outcome.failed[batch[0][0].request.request_id] = error
                return
            log.warning("a step raised; looking for the sequence at fault", sequences=len(batch), error=repr(error))
            half = len(batch) // 2
            self._run(batch[:half], coming, progress, outcome)
            self._run(batch[half:], coming, progress, outcome)
            return
        outcome.void |= void
        speaking = (s.request.request_id for s, count in batch if s.computed + count == len(s.tokens))
        outcome.rows.update(zip(speaking, logits, strict=True))

    def _probe(self, s: Sequence, count: int, error: Exception) -> None:
        """Raise `error` if not even a single token can be computed, on an unshared page of this sequence."""
        last = s.blocks[(s.computed + count - 1) // self.executor.shape.chunk_tokens]
        harmless = Slice([0], 0, last.pages[:, None].copy(), False)
        try:
            self.runner.step([harmless], lambda layer: None, lambda layer: None)
        except Exception:
            raise error from None

    def _attempt(
        self, batch: Batch, coming: Arriving, progress: StepProgress | None, outcome: Outcome
    ) -> tuple[Row, set[str]]:
        """Logits (on the host, in batch order) of sequences whose tokens are all computed, and void request ids."""
        failpoints.reach("step", [s.request for s, _ in batch])
        slices = []
        tables = {}
        if self._moves != self.executor.moves:
            self._moves, self._tables = self.executor.moves, {}
        for s, count in batch:
            chunks = -(-(s.computed + count) // self.executor.shape.chunk_tokens)
            known = self._tables.get(s)
            tables[s] = table = (
                known
                if known is not None and known.blocks is s.blocks
                else _Table(s.blocks, self.executor.shape.layers)
            )
            pages = table.upto(chunks)
            tokens, ends = s.tokens[s.computed : s.computed + count], s.computed + count == len(s.tokens)
            slices.append(Slice(tokens, s.computed, pages, ends, s.adapter.number))
        self._tables = tables
        void: set[str] = set()

        def before_layer(layer: int) -> None:
            if not arriving:
                return
            began_s = clock.now()
            for request_id in arriving:
                if request_id not in void and not self._wait_for_layer(coming[request_id], layer):
                    void.add(request_id)
            outcome.stalled_s += clock.now() - began_s

        def after_layer(layer: int) -> None:
            self.beats.seen(clock.now())
            if progress:
                progress.reached(layer + 1)

        clock = self.executor.clock
        arriving = [s.request.request_id for s, _ in batch if s.request.request_id in coming]
        logits = self.runner.step(slices, before_layer, after_layer)
        return logits.cpu().numpy(), void

    def _wait_for_layer(self, coming: list[Coming], layer: int) -> bool:
        """Wait until this layer of `coming` is ready. False if it will not arrive."""
        rows = [(each.load_id, each.row) for each in coming if layer in each.layers]
        deadline = self.executor.clock.now() + LAYER_TIMEOUT_S
        with self.executor.table.progress:
            while rows:
                rows = [(load_id, row) for load_id, row in rows if not self._is_ready(load_id, row, layer)]
                if not rows:
                    break
                if any(self._has_ended(load_id) for load_id, _ in rows) or self.executor.clock.now() > deadline:
                    return False
                self.executor.table.progress.wait(0.2)
                self.beats.seen(self.executor.clock.now())  # the delay is not the engine's, and the wait is bounded
        return True

    def _is_ready(self, load_id: int, row: int, layer: int) -> bool:
        load = self.executor.table.open.get(load_id)
        return load is not None and bool(load.ready[row, layer])

    def _has_ended(self, load_id: int) -> bool:
        load = self.executor.table.open.get(load_id)
        return load is None or load.closed
