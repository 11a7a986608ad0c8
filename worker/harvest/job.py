"""One job from its files to its result: reads data, goes on from the last checkpoint, trains, and writes checkpoints on
the way.

Runs in the process that the worker starts for it, or in a test. Who may compute when is the gate's matter, where
weights are the window's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from contracts.errors import ConfigError
from contracts.finetune import Job, check_settings
from runtime.model_config import load_config
from worker.harvest.adapter import Adapter, Empty, check_trainable, plain_empty
from worker.harvest.checkpoints import Checkpoints, Line, State, job_digest, steps_of
from worker.harvest.data import Examples, Reader
from worker.harvest.gate import OPEN, Frozen, Gate, Stopped
from worker.harvest.merge import merge
from worker.harvest.partition import unit_rows
from worker.harvest.training import StepResult, Trainer
from worker.models.load import find_eos_ids
from worker.text.codec import TextCodec

#: Directory of the merged model, in the job's.
MERGED = "merged"


@dataclass(frozen=True, slots=True)
class Reached:
    """How far a job is. loss: of the last step; validation_loss: of the last checkpoint; NaN: none yet. tokens: trained
    so far. checkpoints: their steps."""

    step: int
    steps: int
    loss: float
    validation_loss: float
    tokens: int
    checkpoints: tuple[int, ...]


def read_data(job: Job, base: Path, gate: Gate) -> tuple[Examples, Examples | None]:
    """The training and validation examples of a job. Raises InvalidRequest with the line's number, ConfigError, and
    Stopped."""
    config = load_config(base)
    check_trainable(config)
    most = job.settings.max_tokens or config.max_tokens
    if most > config.max_tokens:
        raise ConfigError(f"max_tokens = {most}: the model takes at most {config.max_tokens}")

    reader = Reader(TextCodec.load(base), find_eos_ids(base, config), config.vocab_size, most, gate, job.created_s)
    return reader.read(Path(job.data)), reader.read(Path(job.validation)) if job.validation else None


class Running:
    """A job under way on `base`, the model's directory, whose weights `frozen` lends."""

    def __init__(
        self,
        job: Job,
        base: Path,
        base_digest: bytes,
        data: tuple[Examples, Examples | None],
        frozen: Frozen,
        gate: Gate,
        lanes: int = 1,
        empty: Empty = plain_empty,
        report: Callable[[Reached], None] = lambda _: None,
    ) -> None:
        """Goes on from the last checkpoint, or measures the partition and begins. base_digest: of weights and
        architecture (`worker.models.digest.model_digest`). report: called after each step, and at the start. Raises
        ConfigError, and Stopped."""
        check_settings(job.settings)
        self._job, self._base, self._gate, self._report = job, base, gate, report
        self._files = Checkpoints(Path(job.out), job.settings, job.model)
        training, validation = data
        self._digest = job_digest(
            job.settings, base_digest, training.digest(), validation.digest() if validation else b""
        )
        state = self._files.newest(self._digest)
        config = load_config(base)
        adapter = Adapter(config, job.settings, empty)
        if state is not None:
            self.partition = state.partition
        else:
            longest = max(max(examples.lengths) for examples in data if examples is not None)
            self.partition = unit_rows(config, adapter, job.settings.dropout, longest, frozen, gate)
        #: The log's line of the last step, and whether it is there; its validation loss comes last.
        self._line: Line = {}
        self._logged = True
        self._validation_loss = math.nan
        self.trainer = Trainer(
            config, job.settings, training, validation, frozen, gate, self.partition, adapter, lanes, empty
        )
        try:
            self._resume(state)
        except BaseException:
            self.trainer.close()
            raise

    def _resume(self, state: State | None) -> None:
        trainer = self.trainer
        self._files.resume(state, trainer.adapter, trainer.optimizer)
        if state is not None:
            trainer.step, trainer.tokens = state.step, state.tokens
            self._line, self._logged = state.line, state.logged
            self._validation_loss = math.nan if state.validation_loss is None else state.validation_loss
        self._report(self._reached())

    def train(self) -> None:
        """Trains to the end, and writes the result. Raises Stopped after a checkpoint of the last whole step; and
        ConfigError, TrainingFailed, InvalidRequest, when the job has failed. Once."""
        trainer, files = self.trainer, self._files
        try:
            if not self._logged:
                self._conclude()
            while trainer.step < trainer.steps:
                self._line, self._logged = _line(trainer.train_step(), trainer.tokens), False
                self._conclude()
            files.finish(trainer.adapter)
            if self._job.register:
                merge(self._base, files.out, files.out / MERGED, self._gate)
        except Stopped:
            if trainer.step and trainer.step not in steps_of(files.out):
                self._checkpoint(OPEN)
            raise
        finally:
            trainer.close()

    def _conclude(self) -> None:
        """After a step: validation and a checkpoint, when they are due, and the log."""
        trainer = self.trainer
        due = trainer.step % self._job.settings.checkpoint_every == 0 or trainer.step == trainer.steps
        if due:
            self._validation_loss = trainer.validation_loss()
            self._line["validation_loss"] = _known(self._validation_loss)
        self._files.log(self._line)
        self._logged = True
        if due:
            self._checkpoint(self._gate)
        self._report(self._reached())

    def _checkpoint(self, gate: Gate) -> None:
        trainer = self.trainer
        state = State(
            job=self._digest,
            step=trainer.step,
            tokens=trainer.tokens,
            line=self._line,
            logged=self._logged,
            validation_loss=_known(self._validation_loss),
            partition=self.partition,
        )
        self._files.write(state, trainer.adapter, trainer.optimizer, gate)

    def _reached(self) -> Reached:
        trainer, steps = self.trainer, tuple(steps_of(self._files.out))
        loss = self._line.get("loss")
        loss = math.nan if loss is None else loss
        return Reached(trainer.step, trainer.steps, loss, self._validation_loss, trainer.tokens, steps)


def _known(loss: float) -> float | None:
    return None if math.isnan(loss) else loss


def _line(done: StepResult, tokens: int) -> Line:
    return {
        "step": done.step,
        "loss": done.loss,
        "validation_loss": None,
        "tokens": tokens,
        "learning_rate": done.learning_rate,
        "gradient_norm": done.gradient_norm,
    }
