"""Learns the call graph of an agent workflow from recorded runs, with the scheduler's own code.

A recording is JSON lines, an object a request: `{"run": "job-7", "agent": "qa", "session_id": "job-7:qa", "start_s":
12.5, "end_s": 14.0}`. Times are seconds on any one clock; lines may come in any order.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from contracts.errors import ConfigError, InvalidRequest
from contracts.ids import check_name
from contracts.workflow import Graph, Hop
from scheduler.core.callgraph import CallGraph
from scheduler.core.callgraph_runs import Run

FIELDS = ("run", "agent", "session_id", "start_s", "end_s")


class Recorded(NamedTuple):
    """One request."""

    run: str
    agent: str
    session_id: str
    start_s: float
    end_s: float


def read_recording(path: Path) -> list[Recorded]:
    """The requests of one file. Raises ConfigError naming file, line and field."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path} cannot be read ({e}); give a file of JSON lines") from e
    return [_request(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]


def learn(requests: Iterable[Recorded]) -> tuple[CallGraph, int]:
    """The call graph of these requests, and the number of runs. Pure."""
    graph, runs = CallGraph(), dict[str, Run]()
    known = list(requests)
    # At equal times, ends come before begins, as the end may have caused the begin. A request without duration begins
    # before it ends.
    begins = [(r.start_s, 1, i) for i, r in enumerate(known)]
    ends = [(r.end_s, 0 if r.end_s > r.start_s else 2, i) for i, r in enumerate(known)]
    for at_s, kind, i in sorted(begins + ends):
        r = known[i]
        run = runs.setdefault(r.run, Run(graph))
        if kind == 1:
            run.begin(str(i), Hop("recorded", r.agent, r.run), r.session_id, at_s)
        else:
            run.end(str(i), at_s)
    return graph, len(runs)


def as_declared(graph: CallGraph) -> Graph:
    """The observed graph in the form of a declaration."""
    return Graph(tuple(graph.agents), tuple(edge for edge, _ in graph.observed()))


def _request(line: str, where: str) -> Recorded:
    try:
        data: Any = json.loads(line)
    except (ValueError, RecursionError):
        raise ConfigError(f"{where}: not JSON; give an object a line with {', '.join(FIELDS)}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: not an object; give one with {', '.join(FIELDS)}")
    for name in FIELDS:
        if name not in data:
            raise ConfigError(f"{where}: {name} is missing; give {', '.join(FIELDS)}")
    try:
        run, agent, session_id = (check_name(data[name], name) for name in FIELDS[:3])
    except InvalidRequest as e:
        raise ConfigError(f"{where}: {e.message}") from None
    times = []
    for name in FIELDS[3:]:
        value = data[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(f"{where}: {name} is no number of seconds; give one such as 12.5")
        times.append(float(value))
    if times[1] < times[0]:
        raise ConfigError(f"{where}: end_s {times[1]:g} is before start_s {times[0]:g}; both are seconds on one clock")
    return Recorded(run, agent, session_id, *times)
