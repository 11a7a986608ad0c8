"""Plans of a workload's loads: one for each number of users, or each time scale. Pure, except for reading the trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.agents import team_projects
from loadtest.compare.settings import WorkloadSection
from loadtest.figures import Slo
from loadtest.generate_trace import generated_requests
from loadtest.habits import Habits
from loadtest.plans import PlannedSession
from loadtest.policies import fixed_answers, model_max_tokens
from loadtest.sessions import Session, find_sessions, first_requests
from loadtest.traces import read_trace
from loadtest.users import Loop
from loadtest.variants import with_habits, with_priorities, with_shares
from loadtest.workload import fitting_scale, longest_tokens, plan, prefill_heavy, salted

#: Share of the model's context to use, as lengths are estimates.
_CONTEXT_MARGIN = 0.98
#: Default of `begin_within_s`, in seconds of the trace.
_SPREAD_S = 10.0


@dataclass(frozen=True, slots=True)
class Point:
    """One load of a workload. users: 0 in an open loop."""

    users: int
    time_scale: float

    @property
    def label(self) -> str:
        """Its name in reports."""
        return f"{self.users} users" if self.users else f"times × {self.time_scale:g}"

    @property
    def load(self) -> float:
        """Its position on a plot's axis: higher is more load."""
        return float(self.users) if self.users else 1 / self.time_scale


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload in memory. body: fields of every request. described: facts for reports."""

    section: WorkloadSection
    sessions: tuple[Session, ...]
    length_scale: float
    body: dict[str, Any]
    described: dict[str, Any]

    @property
    def points(self) -> list[Point]:
        """Its loads, in the section's order."""
        section = self.section
        return [Point(n, section.time_scales[0]) for n in section.users] or [
            Point(0, scale) for scale in section.time_scales
        ]

    @property
    def slo(self) -> Slo | None:
        """The latency objective, if there is one."""
        return Slo(self.section.slo.ttft_s, self.section.slo.tpot_s) if self.section.slo else None

    def loop(self, point: Point) -> Loop:
        """How a point's plan is sent."""
        seconds, within_s = self.section.seconds, self.section.begin_within_s
        spread_s = (_SPREAD_S * point.time_scale if within_s is None else within_s) if point.users else 0.0
        return Loop(point.users, float("inf") if seconds is None else seconds, spread_s, self.section.seed)

    def plan(self, point: Point, salt: int = 0) -> list[PlannedSession]:
        """The plan of `point`. Each salt gives other words, so that plans share no cache."""
        section = self.section
        if section.agents is not None:
            agents, seed = section.agents, section.seed + 1_000_003 * salt
            planned = team_projects(
                agents.projects, agents.files, seed, every_s=agents.every_s, time_scale=point.time_scale
            )
        else:
            planned = plan(
                salted(self._held(point), salt),
                length_scale=self.length_scale,
                time_scale=point.time_scale,
                seed=section.seed,
                max_answer_tokens=section.max_answer_tokens,
                trace_texts=section.text == "trace",
            )
        if section.tenants:
            planned = with_shares(planned, section.tenants, section.seed, "tenant")
        if section.models:
            planned = with_shares(planned, section.models, section.seed, "model")
        if section.urgent:
            planned = with_priorities(planned, section.urgent, section.seed)
        if section.agents is None:
            planned = with_habits(planned, Habits(**section.hints.model_dump()), section.seed, point.time_scale)
        return planned

    def _held(self, point: Point) -> Sequence[Session]:
        """The conversations of a point; in a closed loop, enough for about `requests_per_user` requests a user."""
        each = self.section.requests_per_user
        if each is None or not point.users:
            return self.sessions
        turns = count = 0
        while count < len(self.sessions) and (turns < each * point.users or count < point.users):
            turns += len(self.sessions[count].turns)
            count += 1
        return self.sessions[:count]


def read_workload(section: WorkloadSection) -> Workload:
    """The workload of a section. Raises TraceError, OSError, and ValueError if it does not fit the model."""
    body = fixed_answers(section.model_directory) if section.model_directory is not None else {}
    if section.agents is not None:
        return Workload(section, (), 1.0, body, {"projects": section.agents.projects, "files": section.agents.files})
    sessions = _sessions(section)
    if not sessions:
        raise ValueError(f"the trace has no session of at least {section.min_turns} turns; lower min_turns")
    scale = section.length_scale or _fitting(section, sessions)
    described = {
        "requests": sum(len(s.turns) for s in sessions),
        "sessions": len(sessions),
        "length_scale": scale,
        "longest_session_tokens": longest_tokens(sessions, scale, section.max_answer_tokens),
    }
    return Workload(section, tuple(sessions), scale, body, described)


def _sessions(section: WorkloadSection) -> list[Session]:
    if section.trace is not None:
        requests = read_trace(section.trace)
    else:
        assert section.generate is not None
        requests = generated_requests(**section.generate.model_dump(), seed=section.seed)
    sessions = first_requests(find_sessions(requests), section.requests, section.min_turns)
    heavy = section.prefill_heavy
    return prefill_heavy(sessions, heavy.prompt_tokens, heavy.answer_tokens) if heavy else sessions


def _fitting(section: WorkloadSection, sessions: Sequence[Session]) -> float:
    limit = section.max_context_tokens
    if limit is None:
        assert section.model_directory is not None
        limit = model_max_tokens(section.model_directory)
    return fitting_scale(sessions, int(limit * _CONTEXT_MARGIN), section.max_answer_tokens)
