"""Loads with a fixed set of requests, and what a comparison of them leaves: figures by load, and every request."""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matching import Key, Row, figures, verdicts

from loadtest.compare.load import Point, Workload, read_workload
from loadtest.compare.run import Comparison
from loadtest.compare.settings import WorkloadSection

COLUMNS = (
    "target", "load", "repeat", "session", "turn", "sent_s", "ttft_s", "end_s", "prompt_tokens", "output_tokens",
    "cached_tokens", "node", "hint_s", "error",
)  # fmt: skip


def section(
    trace: Path | None, requests: int, rates: Sequence[float], max_context: int, model: Path | None, seed: int
) -> WorkloadSection:
    """An open loop of the trace's conversations of three turns and more, at `rates` requests a second. Every target
    answers all `requests`, however long it takes."""
    source: dict[str, Any] = (
        {"trace": trace.absolute()} if trace else {"generate": {"sessions": 600, "mean_prompt_tokens": 9000}}
    )
    given = source | {"requests": requests, "min_turns": 3, "max_context_tokens": max_context, "seed": seed}
    if model is not None:
        given["model_directory"] = model
    unscaled = read_workload(WorkloadSection.model_validate(given))
    scales = [round(natural_rate(unscaled) / rate, 4) for rate in sorted(rates)]
    return WorkloadSection.model_validate(given | {"time_scales": scales})


def natural_rate(load: Workload) -> float:
    """Requests a second of the trace's own times. Raises ValueError if all arrive at once."""
    arrivals = [turn.arrival_s for session in load.sessions for turn in session.turns]
    span_s = max(arrivals) - min(arrivals)
    if span_s <= 0:
        raise ValueError("all requests of the trace arrive at once; give more --requests")
    return len(arrivals) / span_s


def planned(load: Workload, point: Point, repeats: Iterable[int]) -> set[Key]:
    """Every request of a load, by `matching.key_of`."""
    number = load.points.index(point)
    return {
        (repeat, session.session_id, turn)
        for repeat in repeats
        for session in load.plan(point, salt=repeat * len(load.points) + number + 1)
        for turn in range(len(session.turns))
    }


def rows(made: Comparison, name: str, label: str) -> list[dict[str, Any]]:
    """The requests of a target at a load, with `repeat`; without those of a repeat that was cut off."""
    runs = [run for run in made.runs.get(name, {}).get(label, []) if not run.get("partial")]
    return [outcome | {"repeat": run["repeat"]} for run in runs for outcome in run["outcomes"]]


def loads(made: Comparison, ours: str, peers: Sequence[str]) -> dict[str, Any]:
    """Figures and verdicts by load, over the repeats that every target has which did not end with an error."""
    found: dict[str, Any] = {}
    for point in made.workload.points:
        given = {t.name: rows(made, t.name, point.label) for t in made.targets if t.name not in made.errors}
        given = {name: of for name, of in given.items() if of}
        repeats = set.intersection(*({row["repeat"] for row in of} for of in given.values())) if given else set()
        if not repeats:
            continue
        kept: dict[str, Sequence[Row]] = {n: [r for r in of if r["repeat"] in repeats] for n, of in given.items()}
        of = figures(kept, planned(made.workload, point, repeats), ours, made.workload.section.seed)
        found[point.label] = {
            "requests_per_s": round(natural_rate(made.workload) / point.time_scale, 4),
            "repeats": len(repeats),
            "not_run": [target.name for target in made.targets if target.name not in given],
            "targets": of,
            "verdicts": verdicts(of, ours, peers),
        }
    return found


def write_outcomes(path: Path, made: Comparison) -> int:
    """Write every request of every target to a compressed CSV; the same requests give the same bytes. Returns their
    number."""
    text, count = io.StringIO(), 0
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for target in made.targets:
        for point in made.workload.points:
            for row in rows(made, target.name, point.label):
                known: Mapping[str, Any] = {"target": target.name, "load": point.label} | row
                writer.writerow(["" if known.get(c) is None else known[c] for c in COLUMNS])
                count += 1
    path.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))
    return count
