"""A stand-in for what a worker does about fine-tuning jobs: it trains in no time, and only when it is told to."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

from contracts.finetune import Job, JobState, Progress

STEPS, CHECKPOINT_EVERY = 10, 5


class PlayedTrainer:
    """Keeps `Trains`' word. `advance` trains; a job's checkpoint and result are files in its directory, as a trainer's
    are. full: its disk is full."""

    def __init__(self, spare: float = 0.5, kept: dict[str, int] | None = None) -> None:
        """kept: checkpoints by job, instead of files."""
        self._kept = kept
        self.jobs: dict[str, Job] = {}
        self.told: dict[str, Progress] = {}
        self.started: list[str] = []
        self.stopped: list[tuple[str, bool]] = []
        self._spare, self.why = spare, ""
        self.full = False
        self._lock = threading.Lock()

    # ---- Trains ------------------------------------------------------------------------------------------------
    def start(self, job: Job) -> None:
        with self._lock:
            if job.id in self.jobs:
                return
            self.started.append(job.id)
            self.jobs[job.id] = job
            at = self._kept.get(job.id, 0) if self._kept is not None else _checkpoint(job)
            kept = tuple(range(CHECKPOINT_EVERY, at + 1, CHECKPOINT_EVERY))
            self.told[job.id] = Progress(job.id, JobState.RUNNING, at, STEPS, checkpoints=kept, layers=4, shares=2)

    def stop(self, job_id: str, cancelled: bool) -> None:
        with self._lock:
            if job_id not in self.jobs:
                return
            self.stopped.append((job_id, cancelled))
            del self.jobs[job_id]
            told = self.told.pop(job_id)
            if cancelled:
                self.told[job_id] = replace(told, state=JobState.CANCELLED)

    def progress(self) -> list[Progress]:
        with self._lock:
            return list(self.told.values())

    def spare(self) -> float:
        return self._spare

    def refuses(self) -> str:
        return self.why

    # ---- the test's --------------------------------------------------------------------------------------------
    def set_spare(self, spare: float) -> None:
        self._spare = spare

    def advance(self, steps: int = 1) -> None:
        """Every job trains so many steps, or fails."""
        with self._lock:
            for job_id, job in list(self.jobs.items()):
                for _ in range(steps):
                    self._step(job_id, job)

    def _step(self, job_id: str, job: Job) -> None:
        told = self.told[job_id]
        if told.state.ended:
            return
        if self.full:
            self._end(replace(told, state=JobState.FAILED, error="the disk is full", retry=True))
            return
        step = told.step + 1
        told = replace(told, step=step, loss=4.0 / step, tokens=step * 100, tokens_per_s=50.0, window=2, split=1)
        if step % CHECKPOINT_EVERY == 0:
            if self._kept is not None:
                self._kept[job_id] = step
            else:
                Path(job.out).mkdir(parents=True, exist_ok=True)
                (Path(job.out) / "checkpoint").write_text(str(step))
            told = replace(told, checkpoints=(*told.checkpoints, step), validation_loss=5.0 / step)
        self.told[job_id] = told
        if step >= STEPS:
            if self._kept is None:
                Path(job.out, "adapter_config.json").write_text('{"peft_type": "LORA"}')
                Path(job.out, "adapter_model.safetensors").write_bytes(b"\0" * 64)
            self._end(replace(told, state=JobState.SUCCEEDED))

    def fail(self, job_id: str, error: str, *, retry: bool) -> None:
        """The job fails here."""
        with self._lock:
            self._end(replace(self.told[job_id], state=JobState.FAILED, error=error, retry=retry))

    def _end(self, told: Progress) -> None:
        self.told[told.id] = told
        self.jobs.pop(told.id, None)


def _checkpoint(job: Job) -> int:
    path = Path(job.out) / "checkpoint"
    return int(path.read_text()) if path.exists() else 0
