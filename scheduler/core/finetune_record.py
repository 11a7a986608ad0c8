"""What the scheduler keeps of a fine-tuning job: its state, where it is, and what became of it, all bounded in size.

Decides nothing; `core.finetunes` does. Times that end in `_s` are on the scheduler's clock unless they say "since the
epoch".
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from contracts.finetune import Job, JobState, Progress
from scheduler.core.rollout import Adoption

#: Entries that are kept: of events and checkpoints the latest, of losses evenly over the steps.
MOST_EVENTS, MOST_CHECKPOINTS, MOST_LOSSES = 200, 200, 512
_MOST_MESSAGE = 1000


@dataclass(frozen=True, slots=True)
class Event:
    """number: of the job's events, from 1. at_s: since the epoch. level: info, warn or error."""

    number: int
    at_s: float
    level: str
    message: str


@dataclass(frozen=True, slots=True)
class Loss:
    """Losses at a step; NaN: not measured."""

    step: int
    loss: float
    validation_loss: float


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint, with the losses then. at_s: since the epoch."""

    step: int
    at_s: float
    loss: float
    validation_loss: float


@dataclass(slots=True)
class Record:
    """A job. Invariants (`Finetunes.validate`): an ended job stays ended; a job is on one device at most, and no other
    job that has not ended is on the same."""

    job: Job
    progress: Progress
    #: That has the job or, when it leaves or has ended, may still stop it; empty: none.
    device: str = ""
    #: Why it leaves its device; empty: it stays.
    leaving: str = ""
    #: Failures for reasons of a node since the last checkpoint.
    tries: int = 0
    #: Since the epoch; 0: not yet.
    started_s: float = 0.0
    ended_s: float = 0.0
    events: list[Event] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    #: How far its model is served; None: it is not to be, or not yet. Without a name: it cannot be.
    adoption: Adoption | None = None
    #: The device that failed it last; others come first. Nothing starts it before `not_before_s`.
    avoid: str = ""
    not_before_s: float = float("-inf")
    #: When its device was told to begin, until it says that it has; when its device was last there, once it is away;
    #: since when another device has clearly more to spare.
    sent_s: float | None = None
    lost_s: float | None = None
    worse_s: float | None = None

    @property
    def state(self) -> JobState:
        """Its state."""
        return self.progress.state

    @property
    def ended(self) -> bool:
        """Whether nothing happens to it any more."""
        return self.state.ended

    @property
    def placed(self) -> bool:
        """Whether it belongs on its device."""
        return bool(self.device) and not self.leaving and not self.ended

    @property
    def serves(self) -> bool:
        """Whether its model is served, or will be."""
        succeeded = self.job.register and self.state is JobState.SUCCEEDED
        return succeeded and (self.adoption is None or bool(self.adoption.name and not self.adoption.gone))

    def note(self, at_s: float, message: str, level: str = "info") -> None:
        """An event. at_s: since the epoch."""
        number = self.events[-1].number + 1 if self.events else 1
        self.events.append(Event(number, at_s, level, message[:_MOST_MESSAGE]))
        del self.events[:-MOST_EVENTS]

    def learn(self, told: Progress, at_s: float) -> None:
        """Take what its device says of a job that runs. at_s: since the epoch."""
        last = self.checkpoints[-1].step if self.checkpoints else 0
        for step in sorted(step for step in told.checkpoints if step > last):
            self.checkpoints.append(Checkpoint(step, at_s, told.loss, told.validation_loss))
            self.tries = 0
            self.note(at_s, f"checkpoint at step {step}{_losses(told)}")
        del self.checkpoints[:-MOST_CHECKPOINTS]
        if not math.isnan(told.loss) and (not self.losses or told.step > self.losses[-1].step):
            self.losses.append(Loss(told.step, told.loss, told.validation_loss))
            if len(self.losses) > MOST_LOSSES:
                self.losses = [*self.losses[:-1:2], self.losses[-1]]
        known = tuple(dict.fromkeys([*(c.step for c in self.checkpoints)]))
        self.progress = replace(told, id=self.job.id, checkpoints=known)

    def free(self) -> None:
        """It is on no device any more."""
        self.device = self.leaving = ""
        self.sent_s = self.lost_s = self.worse_s = None

    def rest(self, waits: str) -> None:
        """It waits for a device. waits: why, for users."""
        self.progress = replace(
            self.progress, state=JobState.QUEUED, waits=waits, tokens_per_s=0.0, window=0, split=0, tpot_s=0.0
        )


def _losses(told: Progress) -> str:
    found = {"loss": told.loss, "validation loss": told.validation_loss}
    said = [f"{name} {value:.4f}" for name, value in found.items() if not math.isnan(value)]
    return f": {', '.join(said)}" if said else ""
