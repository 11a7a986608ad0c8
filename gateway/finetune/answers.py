"""Jobs, events and checkpoints as OpenAI's API shows them, from the scheduler's messages."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, TypeVar

from contracts.errors import InvalidRequest
from contracts.finetune import JobState
from gateway.finetune.files import Info
from gateway.finetune.requests import LEARNING_RATE

_Item = TypeVar("_Item")


def file_object(info: Info) -> dict[str, Any]:
    """A file."""
    return {
        "id": info.id,
        "object": "file",
        "bytes": info.bytes_,
        "created_at": int(info.created_s),
        "filename": info.filename,
        "purpose": info.purpose,
        "status": "processed",
        "expires_at": None,
        "status_details": None,
    }


def job_object(found: Any, results: Sequence[str], now_s: float) -> dict[str, Any]:
    """A job. found: the message. results: ids of its result files. now_s: since the epoch."""
    job, told, note = found.job, found.progress, note_of(found)
    state = JobState(told.state)
    hyperparameters = {
        "n_epochs": job.settings.epochs,
        "batch_size": job.settings.batch_size,
        "learning_rate_multiplier": round(job.settings.learning_rate / LEARNING_RATE, 9),
    }
    succeeded = state is JobState.SUCCEEDED
    error = {"code": "training_failed", "message": told.error, "param": None}
    return {
        "id": job.id,
        "object": "fine_tuning.job",
        "created_at": int(job.created_s),
        "started_at": int(found.started_s) or None,
        "finished_at": int(found.ended_s) or None,
        "model": job.model,
        "fine_tuned_model": _name(job) if succeeded and job.register else None,
        "organization_id": job.tenant,
        "status": state.value,
        "error": error if state is JobState.FAILED else None,
        "hyperparameters": hyperparameters,
        "method": {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}},
        "training_file": str(note.get("training_file") or ""),
        "validation_file": note.get("validation_file"),
        "result_files": list(results),
        "trained_tokens": told.tokens if succeeded else None,
        "estimated_finish": _finish(state, told, now_s),
        "seed": job.settings.seed,
        "user_provided_suffix": note.get("suffix"),
        "metadata": note.get("metadata"),
        "integrations": [],
    }


def note_of(found: Any) -> dict[str, Any]:
    """What the job's creation noted of it."""
    try:
        note = json.loads(found.job.note)
    except ValueError:
        return {}
    return note if isinstance(note, dict) else {}


def event_objects(found: Any) -> list[dict[str, Any]]:
    """A job's events, the newest first."""
    return [
        {
            "id": f"ftevent-{found.job.id.removeprefix('ftjob-')}-{event.number}",
            "object": "fine_tuning.job.event",
            "created_at": int(event.at_s),
            "level": event.level,
            "message": event.message,
            "type": "message",
            "data": {},
        }
        for event in reversed(found.events)
    ]


def checkpoint_objects(found: Any) -> list[dict[str, Any]]:
    """A job's checkpoints, the newest first."""
    return [
        {
            "id": f"ftckpt-{found.job.id.removeprefix('ftjob-')}-{c.step}",
            "object": "fine_tuning.job.checkpoint",
            "created_at": int(c.at_s),
            "fine_tuned_model_checkpoint": f"{_name(found.job)}:ckpt-step-{c.step}",
            "fine_tuning_job_id": found.job.id,
            "step_number": c.step,
            "metrics": {"step": c.step} | _measured(train_loss=c.loss, valid_loss=c.validation_loss),
        }
        for c in reversed(found.checkpoints)
    ]


def metrics_csv(found: Any) -> bytes:
    """Losses by step, as OpenAI's result files have them."""
    rows = ["step,train_loss,valid_loss"]
    for point in found.losses:
        cells = (point.loss, point.validation_loss)
        rows.append(f"{point.step}," + ",".join("" if math.isnan(cell) else f"{cell:.6f}" for cell in cells))
    return ("\n".join(rows) + "\n").encode()


def page(items: Sequence[_Item], ids: Sequence[str], after: str, limit: int) -> tuple[Sequence[_Item], bool]:
    """The items behind the one with the id `after`, at most `limit`, and whether there are more. Raises InvalidRequest
    for an unknown id."""
    if after and after not in ids:
        raise InvalidRequest(f"after: nothing in this list has the id {after[:80]!r}", param="after")
    rest = items[ids.index(after) + 1 :] if after else items
    return rest[:limit], len(rest) > limit


def listing(data: Sequence[dict[str, Any]], more: bool) -> dict[str, Any]:
    """OpenAI's list."""
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"object": "list", "data": list(data), **ends, "has_more": more}


def _name(job: Any) -> str:
    return f"{job.model}:{job.suffix}"


def _measured(**values: float) -> dict[str, float]:
    return {name: value for name, value in values.items() if math.isfinite(value)}


def _finish(state: JobState, told: Any, now_s: float) -> int | None:
    if state is not JobState.RUNNING or not told.step or told.tokens_per_s <= 0 or told.steps < told.step:
        return None
    left_s = (told.steps - told.step) * told.tokens / told.step / told.tokens_per_s
    return int(now_s + left_s) if math.isfinite(left_s) else None
