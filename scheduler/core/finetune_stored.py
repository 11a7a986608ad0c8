"""Records of fine-tuning jobs as JSON values, for files. What only matters while a scheduler runs is left out: a
restarted one learns it from the workers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from contracts.finetune import Job, JobState, Progress, Settings
from scheduler.core.finetune_record import Checkpoint, Event, Loss, Record
from scheduler.core.rollout import Adoption

FORMAT = 1
_PLAIN = ("device", "leaving", "tries", "started_s", "ended_s", "avoid")


def to_stored(record: Record) -> dict[str, Any]:
    """The record as JSON values; null stands for NaN."""
    data = {"format": FORMAT, "job": asdict(record.job), "progress": asdict(record.progress)}
    data |= {name: getattr(record, name) for name in _PLAIN}
    data["adoption"] = None if record.adoption is None else asdict(record.adoption)
    for name in ("events", "losses", "checkpoints"):
        entries: Sequence[Any] = getattr(record, name)
        data[name] = [asdict(entry) for entry in entries]
    stored: dict[str, Any] = _without_nan(data)
    return stored


def from_stored(data: Any) -> Record:
    """The inverse of `to_stored`. Raises ValueError for anything else."""
    try:
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']} is not known")
        job = data["job"]
        progress = _made(Progress, data["progress"])
        record = Record(
            Job(**job | {"settings": Settings(**job["settings"])}),
            Progress(
                **progress
                | {"state": JobState(progress["state"]), "checkpoints": tuple(map(int, progress["checkpoints"]))}
            ),
            events=[Event(**e) for e in data["events"]],
            losses=[Loss(**_made(Loss, e)) for e in data["losses"]],
            checkpoints=[Checkpoint(**_made(Checkpoint, e)) for e in data["checkpoints"]],
            adoption=_adoption(data.get("adoption")),
            **{name: data[name] for name in _PLAIN},
        )
    except (KeyError, TypeError, AttributeError) as e:
        raise ValueError(f"it is no record of a fine-tuning job: {e!r}") from None
    if record.job.id != record.progress.id or bool(record.ended_s) != record.ended:
        raise ValueError("it contradicts itself")
    return record


def _adoption(data: dict[str, Any] | None) -> Adoption | None:
    if data is None:
        return None
    asked, serve = ([str(device) for device in data[key]] for key in ("asked", "serve"))
    return Adoption(str(data["name"]), str(data["base"]), asked, serve, bool(data["gone"]))


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_nan(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _made(kind: type, data: dict[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass, with NaN for null in those that are numbers."""
    return {f.name: math.nan if data[f.name] is None else data[f.name] for f in fields(kind)}
