"""Draws fine-tuning jobs: a list, one job, and its picture while it runs."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cli.fleet import table
from contracts.finetune import JobState
from contracts.finetune_wire import job_from_wire, progress_from_wire

_BLOCKS = " ▁▂▃▄▅▆▇█"
_ROWS, _MOST_COLUMNS, _LEAST_COLUMNS = 6, 72, 10
#: What is drawn of a loss that has no bounds.
_MOST_LOSS = 1e12
_EVENTS = 5
_SHOWN_EVENTS = 30


def as_data(found: Any) -> dict[str, Any]:
    """A job as JSON values; null stands for numbers that were not measured."""
    data = {
        "job": asdict(job_from_wire(found.job)),
        "progress": asdict(progress_from_wire(found.progress)),
        "node": found.node,
        "started_s": found.started_s,
        "ended_s": found.ended_s,
        "events": [{k: getattr(e, k) for k in ("number", "at_s", "level", "message")} for e in found.events],
        "losses": [{k: getattr(p, k) for k in ("step", "loss", "validation_loss")} for p in found.losses],
        "checkpoints": [
            {k: getattr(c, k) for k in ("step", "at_s", "loss", "validation_loss")} for c in found.checkpoints
        ],
    }
    return {k: _measured(v) for k, v in data.items()}


def _measured(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _measured(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_measured(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def job_table(jobs: Sequence[Any]) -> Table:
    """A row a job."""
    rows = table("job", "model", "state", "step", "loss", "tokens/s", "node", "tenant", "age")
    for found in jobs:
        told = found.progress
        rows.add_row(
            found.job.id,
            f"{found.job.model}:{found.job.suffix}",
            told.state,
            f"{told.step}/{told.steps or '?'}",
            _number(told.loss),
            f"{told.tokens_per_s:.0f}" if told.tokens_per_s else "-",
            found.node or "-",
            found.job.tenant or "-",
            _seconds(time.time() - found.job.created_s),
        )
    return rows


def picture(found: Any, width: int, *, events: int = _EVENTS) -> RenderableType:
    """One job: how far it is, its losses, and its latest events. width: columns."""
    told, job = found.progress, found.job
    facts = Table.grid(padding=(0, 2, 0, 0))
    for name, value in _facts(found):
        facts.add_row(name, Text(value, overflow="fold"))
    parts: list[RenderableType] = [Text(f"{job.id}  {job.model}:{job.suffix}  {told.state}", style="bold"), facts]
    if chart := loss_chart([(p.step, p.loss) for p in found.losses], width):
        parts += [Text(), *map(Text, chart)]
    if found.events:
        parts.append(Text())
        parts += [Text(event_line(event)) for event in found.events[-events:]]
    return Group(*parts)


def shown(found: Any, width: int) -> RenderableType:
    """`upbeat finetune show`."""
    return picture(found, width, events=_SHOWN_EVENTS)


def event_line(event: Any) -> str:
    """An event, with its time."""
    level = "" if event.level == "info" else f"{event.level}: "
    return f"{time.strftime('%H:%M:%S', time.localtime(event.at_s))}  {level}{event.message}"


def _facts(found: Any) -> list[tuple[str, str]]:
    told, job = found.progress, found.job
    facts = [("step", f"{told.step} of {told.steps or '?'}"), ("loss", _number(told.loss))]
    if not math.isnan(told.validation_loss):
        facts.append(("validation loss", _number(told.validation_loss)))
    running = told.state == JobState.RUNNING
    facts += [("trained", f"{told.tokens} tokens" + (f", {told.tokens_per_s:.0f} a second" if running else ""))]
    if running:
        target = f", target {job.settings.tpot_ms:g} ms" if job.settings.tpot_ms else ""
        facts += [
            ("serving keeps", (f"{told.tpot_s * 1e3:.1f} ms a token" if told.tpot_s else "not measured") + target),
            ("window", f"{told.window} of {told.layers} frozen layers on the device"),
            ("split", f"{told.split} of {told.shares} shares train"),
        ]
    if found.node:
        facts.append(("node", found.node))
    if told.waits:
        facts.append(("waits", told.waits))
    if told.error:
        facts.append(("error", told.error))
    return [*facts, ("result" if told.state == JobState.SUCCEEDED else "out", job.out)]


def loss_chart(points: Sequence[tuple[int, float]], width: int) -> list[str]:
    """The losses by step as lines of text, the greatest and the least written beside; none for less than two."""
    points = [(step, max(min(loss, _MOST_LOSS), -_MOST_LOSS)) for step, loss in points if math.isfinite(loss)]
    if len(points) < 2:
        return []
    least, most = min(loss for _, loss in points), max(loss for _, loss in points)
    labels = [f"{loss:.3f}" if abs(loss) < 1000 else f"{loss:.1e}" for loss in (most, least)]
    margin = max(map(len, labels)) + 1
    columns = max(min(width - margin - 1, _MOST_COLUMNS, 2 * len(points)), _LEAST_COLUMNS)
    heights = _heights(points, columns, least, most)
    lines = []
    for row in range(_ROWS - 1, -1, -1):
        label = labels[0] if row == _ROWS - 1 else labels[1] if row == 0 else ""
        cells = (_BLOCKS[max(0, min(8, height - 8 * row))] for height in heights)
        lines.append(f"{label:>{margin - 1}} {''.join(cells)}".rstrip())
    return [*lines, f"{'':>{margin}}steps {points[0][0]} to {points[-1][0]}"]


def _heights(points: Sequence[tuple[int, float]], columns: int, least: float, most: float) -> list[int]:
    """The height of each column in eighths of a row, 1 at least; a column without a point is as the one before."""
    first, last = points[0][0], points[-1][0]
    sums: list[list[float]] = [[] for _ in range(columns)]
    for step, loss in points:
        sums[min(int((step - first) / max(last - first, 1) * columns), columns - 1)].append(loss)
    heights, known = [], points[0][1]
    for column in sums:
        known = sum(column) / len(column) if column else known
        share = (known - least) / (most - least) if most > least else 0.0
        heights.append(1 + round(share * (8 * _ROWS - 1)))
    return heights


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4f}"


def _seconds(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.0f} h"
    )
