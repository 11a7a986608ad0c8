"""Converts fine-tuning jobs and their progress between protobuf messages and domain values."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from contracts.errors import InvalidRequest
from contracts.finetune import Job, JobState, Progress, Settings
from contracts.v1 import scheduler_pb2 as pb

_SETTINGS = tuple(f.name for f in fields(Settings))
_JOB = tuple(f.name for f in fields(Job) if f.name != "settings")
_PROGRESS = tuple(f.name for f in fields(Progress) if f.name not in ("state", "checkpoints"))
#: Most steps of checkpoints that are kept of one report, the latest.
_MOST_CHECKPOINTS = 1000


def job_to_wire(job: Job) -> pb.FinetuneJob:
    """Raises InvalidRequest for a number that no message can hold."""
    settings: dict[str, Any] = {name: getattr(job.settings, name) for name in _SETTINGS}
    try:
        sent = pb.FinetuneSettings(**settings)
    except (ValueError, OverflowError) as e:
        raise InvalidRequest(f"a setting is out of its range: {e}", param="settings") from None
    given: dict[str, Any] = {name: getattr(job, name) for name in _JOB}
    return pb.FinetuneJob(settings=sent, **given)


def job_from_wire(m: pb.FinetuneJob) -> Job:
    given: dict[str, Any] = {name: getattr(m, name) for name in _JOB}
    return Job(settings=Settings(**{name: getattr(m.settings, name) for name in _SETTINGS}), **given)


def progress_to_wire(progress: Progress) -> pb.FinetuneProgress:
    given: dict[str, Any] = {name: getattr(progress, name) for name in _PROGRESS}
    return pb.FinetuneProgress(
        state=progress.state.value, checkpoints=progress.checkpoints[-_MOST_CHECKPOINTS:], **given
    )


def progress_from_wire(m: pb.FinetuneProgress) -> Progress:
    """Raises ValueError for an unknown state."""
    given: dict[str, Any] = {name: getattr(m, name) for name in _PROGRESS}
    return Progress(state=JobState(m.state), checkpoints=tuple(m.checkpoints[-_MOST_CHECKPOINTS:]), **given)
