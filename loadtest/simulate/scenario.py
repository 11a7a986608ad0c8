"""Runs one simulation: conversations, their arrivals and a fleet in, figures out."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contracts.ids import DEFAULT_TENANT, SessionKey
from loadtest.generate_trace import generate
from loadtest.habits import Habits
from loadtest.sessions import Session, find_sessions
from loadtest.simulate.costs import NodeKind
from loadtest.simulate.events import Events
from loadtest.simulate.fleet import Fleet, Variant
from loadtest.simulate.results import figures
from loadtest.simulate.users import Script, ScriptedTurn, Users
from loadtest.traces import TraceRequest, read_trace
from loadtest.typist import typing_times
from loadtest.workload import turn_lengths
from scheduler.core.control import Settings

#: Interval of load samples.
SAMPLE_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class Run:
    """Settings of a run.

    users: number in a closed loop, for `seconds` of virtual time; 0: the whole trace at its times. warm_up_s: not
    counted. drain_s: time for running requests to end. spread_s: users start within it.
    """

    kind: NodeKind
    nodes: int
    variant: Variant
    users: int = 0
    seconds: float = float("inf")
    seed: int = 1
    warm_up_s: float = 0.0
    drain_s: float = 3600.0
    habits: Mapping[str, Habits] = field(default_factory=dict)
    settings: Settings | None = None
    spread_s: float = 60.0


@dataclass(slots=True)
class Outcome:
    """The figures, and the simulation's parts for a closer look."""

    figures: dict[str, Any]
    users: Users
    fleet: Fleet


def trace_sessions(
    path: Path | None, *, sessions: int = 2000, seed: int = 1, prompt_tokens: float = 3000.0, turns: float = 3.0
) -> list[Session]:
    """Conversations of a trace, or generated ones without a path. Raises TraceError, OSError."""
    if path is not None:
        return find_sessions(read_trace(path))
    lines: list[dict[str, Any]] = generate(sessions, seed, mean_turns=turns, mean_prompt_tokens=prompt_tokens)
    requests = [
        TraceRequest(line["timestamp"] / 1000, line["input_length"], line["output_length"], tuple(line["hash_ids"]))
        for line in lines
    ]
    return find_sessions(requests)


def scripts(
    sessions: Sequence[Session],
    *,
    seed: int = 1,
    time_scale: float = 1.0,
    length_scale: float = 1.0,
    max_tokens: int = 1 << 30,
    urgent: float = 0.0,
    tenants: int = 1,
) -> list[Script]:
    """Scripts of users. urgent: share of conversations with priority -1. max_tokens: conversations are cut at it.

    Typing times are not scaled: users do not type faster when a trace is replayed faster.
    """
    draws = random.Random(seed)
    typing = iter(typing_times(sum(len(s.turns) for s in sessions), seed))
    found = []
    for number, session in enumerate(sessions):
        turns, total = [], 0
        drawn = [next(typing) for _ in session.turns]
        for trace, typing_s, (new, answer) in zip(
            session.turns, drawn, turn_lengths(session.turns, length_scale, None), strict=True
        ):
            total += new + answer
            if total > max_tokens:
                break
            turns.append(ScriptedTurn(new, answer, typing_s, trace.arrival_s * time_scale))
        priority = -1 if draws.random() < urgent else 0
        tenant = DEFAULT_TENANT if tenants == 1 else f"tenant-{number % tenants}"
        if turns:
            found.append(Script(SessionKey(tenant, session.name), tuple(turns), priority))
    return found


def simulate(run: Run, said: Sequence[Script]) -> Outcome:
    """Run a simulation to its end. Deterministic, except `real_s`. Raises AssertionError if an invariant breaks."""
    began = time.perf_counter()
    events = Events()
    fleet = Fleet(events, run.kind, run.nodes, run.variant, run.settings)
    users = Users(events, fleet, run.seed, run.habits)
    if run.users:
        users.closed(said, run.users, run.spread_s)
        total = None
    else:
        users.open(said)
        total = sum(len(s.turns) for s in said)
    events.at(run.warm_up_s, lambda: fleet.sample(SAMPLE_EVERY_S))
    events.run(lambda: total is not None and users.ended == total, limit_s=run.seconds)
    samples, until_s = len(fleet.loads), events.now
    users.closing = True
    ending_s = events.now + run.drain_s
    events.run(lambda: users.ended == len(users.requests) and (total is None or users.ended == total), limit_s=ending_s)
    fleet.validate()
    hints, outcomes = fleet.hints, dict(fleet.control.advisories.outcomes)
    found = figures(users.requests, fleet.loads[1:samples], run.warm_up_s, until_s) | {
        "hints": {"sent": hints} | outcomes,
        "migrated": fleet.migrated,
        "moved_bytes": {
            way: round(sum(getattr(n, way).bytes for n in fleet.nodes.values()))
            for way in ("link", "disk", "bus", "blob")
        },
        "busy_share": round(
            sum(n.engine.busy_s for n in fleet.nodes.values()) / (run.nodes * max(events.now, 1e-9)), 4
        ),
        "events": events.done,
        "real_s": round(time.perf_counter() - began, 3),
    }
    return Outcome(found, users, fleet)
