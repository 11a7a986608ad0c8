"""Fine-tuning jobs, as users, schedulers and workers speak of them (HARLI: fine-tuning beside serving).

A job trains a LoRA adapter of one served model on one file. It runs on one worker at a time, and goes on from its last
checkpoint on another. Its files lie in `Job.out`, a path that all nodes see, as the model's directory is.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final, Protocol

from contracts.errors import InvalidRequest


class JobState(str, Enum):
    """State of a job."""

    #: It waits for a worker, or for its worker to begin.
    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    def __str__(self) -> str:
        return self.value

    @property
    def ended(self) -> bool:
        """Whether nothing happens to it any more."""
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


@dataclass(frozen=True, slots=True)
class Settings:
    """How a job trains. The same settings, seed and data give the same adapter, bit for bit, on the same kind of
    machine.

    rank, alpha, dropout: of LoRA. batch_size: examples of an optimizer's step. max_tokens: an example's longer rest is
    cut off; 0: as many as the model takes. checkpoint_every: steps between checkpoints. tpot_ms: time of an output
    token that serving must keep meanwhile; 0: the model's own target.
    """

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    learning_rate: float = 1e-4
    weight_decay: float = 0.0
    warmup_ratio: float = 0.0
    epochs: int = 3
    batch_size: int = 8
    max_tokens: int = 0
    seed: int = 0
    checkpoint_every: int = 50
    tpot_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Job:
    """A job as it was submitted. id: `ftjob-...`. data, validation: JSONL files; validation: empty for none. out: the
    directory of its checkpoints and its result. suffix: of the adapter's name. register: serve the merged model as
    `fine_tuned_model`. tenant: empty for an operator. note: what its submitter keeps with it, such as the API's ids."""

    id: str
    tenant: str
    model: str
    data: str
    out: str
    validation: str = ""
    suffix: str = "adapter"
    register: bool = False
    created_s: float = 0.0
    settings: Settings = field(default_factory=Settings)
    note: str = ""

    @property
    def fine_tuned_model(self) -> str:
        """Name of the model with the adapter."""
        return f"{self.model}:{self.suffix}"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a job is. step, steps: of the optimizer. loss: of the last step; validation_loss: of the last checkpoint;
    NaN: none yet. tokens: trained so far. tokens_per_s: lately. window, layers: frozen layers in device memory, of all.
    split: shares of the device that training has now, of `shares`. checkpoints: their steps. error: why it failed;
    waits: why it does not train just now; empty: neither. retry: it failed for a reason of its node (a dead trainer, a
    full disk), so that another try, there or elsewhere, may succeed."""

    id: str
    state: JobState
    step: int = 0
    steps: int = 0
    loss: float = float("nan")
    validation_loss: float = float("nan")
    tokens: int = 0
    tokens_per_s: float = 0.0
    window: int = 0
    layers: int = 0
    split: int = 0
    shares: int = 0
    tpot_s: float = 0.0
    checkpoints: tuple[int, ...] = ()
    error: str = ""
    waits: str = ""
    retry: bool = False


class Trains(Protocol):
    """What a worker does about jobs. Any thread."""

    def start(self, job: Job) -> None:
        """Begin the job, or go on from its last checkpoint; no effect when it runs here. Why it cannot is reported.
        `progress` has it before this returns, also a job that had ended here and begins again."""
        ...

    def stop(self, job_id: str, cancelled: bool) -> None:
        """End it after a checkpoint: cancelled, or because it goes on elsewhere (then it is forgotten here). No effect
        when it does not run here."""
        ...

    def progress(self) -> list[Progress]:
        """Of each job that runs here, and of those that have ended here since the worker began."""
        ...

    def spare(self) -> float:
        """Part of the device's decode time that training could have, 0 to 1; negative: it takes no job."""
        ...

    def refuses(self) -> str:
        """Why it takes no job at all, for users; empty: it takes some."""
        ...


# ---- what a job may be ---------------------------------------------------------------------------------------------
#: Ids of jobs, and of suffixes: both become names of files.
ID: Final = re.compile(r"ftjob-[A-Za-z0-9]{8,64}")
SUFFIX: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
#: Characters of a model's name with its suffix, of a path, and of a note.
MOST_NAME, MOST_PATH, MOST_NOTE = 128, 4096, 32 << 10
#: Least and most of each setting.
RANGES: Final[dict[str, tuple[float, float]]] = {
    "rank": (1, 256),
    "alpha": (1e-6, 4096),
    "dropout": (0, 0.95),
    "learning_rate": (1e-9, 1),
    "weight_decay": (0, 1),
    "warmup_ratio": (0, 1),
    "epochs": (1, 1000),
    "batch_size": (1, 1024),
    "max_tokens": (0, 1 << 20),
    "seed": (0, (1 << 63) - 1),
    "checkpoint_every": (1, 1_000_000),
    "tpot_ms": (0, 60_000),
}


def check_settings(settings: Settings) -> None:
    """Raises InvalidRequest naming the first setting that is out of its range."""
    for name, (least, most) in RANGES.items():
        value = getattr(settings, name)
        if not math.isfinite(value) or not least <= value <= most:
            raise InvalidRequest(f"{name} = {value}: give a number from {least:g} to {most:g}", param=name)


def check_place(job: Job, data: Path) -> None:
    """A gateway's job reads and writes in its own folder of DATA/adapters. Raises InvalidRequest."""
    place = Path(job.out).parent
    if place.name != job.id or place.parent.parent != data / "adapters":
        raise InvalidRequest(f"out: a gateway's job writes in {data}/adapters/TENANT/{job.id}", param="out")
    for name, path in (("data", job.data), ("validation", job.validation)):
        if path and Path(path).parent != place:
            raise InvalidRequest(f"{name}: a gateway's job reads in {place}", param=name)


def check_job(job: Job) -> None:
    """Raises InvalidRequest naming the first field that is wrong. Looks at no file."""
    if not ID.fullmatch(job.id):
        raise InvalidRequest(f"id = {job.id[:80]!r} must match {ID.pattern}", param="id")
    if not SUFFIX.fullmatch(job.suffix):
        raise InvalidRequest(f"suffix = {job.suffix[:80]!r} must match {SUFFIX.pattern}", param="suffix")
    if len(job.fine_tuned_model) > MOST_NAME:
        raise InvalidRequest(
            f"suffix: the model's name would have {len(job.fine_tuned_model)} characters, {MOST_NAME} at most; shorten "
            "it",
            param="suffix",
        )
    paths = {"data": job.data, "out": job.out} | ({"validation": job.validation} if job.validation else {})
    for name, path in paths.items():
        if not path.startswith("/") or "\0" in path or len(path) > MOST_PATH or ".." in path.split("/"):
            raise InvalidRequest(f"{name} = {path[:80]!r}: give an absolute path without `..`", param=name)
    if len(job.note) > MOST_NOTE:
        raise InvalidRequest(f"note has {len(job.note)} characters, {MOST_NOTE} at most; shorten it", param="note")
    check_settings(job.settings)
