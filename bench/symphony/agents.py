"""MetaGPT-like teams in virtual time (figure 16): `bench.agents.team` draws projects, the simulated fleet serves them.

Teams work concurrently, each on one project after the other. Requests carry workflow, agent and run. With hints the
scheduler's call graph (`scheduler.core.callgraph_table`), learned from uncounted projects, hints the next hops.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.agents.team import WORKFLOW, File, Project, draw
from contracts.ids import DEFAULT_TENANT, SessionKey
from contracts.workflow import Hop
from loadtest.agents import TeamLengths
from loadtest.simulate.costs import NodeKind
from loadtest.simulate.events import Events
from loadtest.simulate.fleet import Fleet, Variant
from loadtest.simulate.request import Request
from loadtest.simulate.results import latencies

#: Lengths as MetaGPT writes them, longer than those of the real runs in bench/agents.
LENGTHS = TeamLengths(note=(100, 400), answer=(400, 900))
_BRIEF_TOKENS = 300


@dataclass(frozen=True)
class Say:
    """A request of an agent in its thread; `tokens` are new, `answer` is the answer's length."""

    agent: str
    thread: str
    tokens: int
    answer: int


#: A team's next step: a request, seconds of tools, or several of these in parallel.
Step = Say | float | list[Any]
Steps = Generator[Step, None, None]


def team(project: Project) -> Steps:
    """The steps of a project."""
    yield Say("manager", "manager", project.brief, project.answers[0])
    yield project.tools_s[0]
    yield Say("architect", "architect", project.design, project.answers[1])
    yield project.tools_s[1]
    yield [_file(number, file) for number, file in enumerate(project.files)]
    yield project.tools_s[2]
    yield Say("manager", "manager", 60, project.answers[2])


def _file(number: int, file: File) -> Steps:
    for review in range(file.reviews):
        for step, (agent, first) in enumerate((("engineer", file.design), ("reviewer", file.task))):
            at = 2 * review + step
            yield Say(agent, f"{agent}-{number}", file.notes[at] if review else first, file.answers[at])
            if at + 1 < 2 * file.reviews:
                yield file.tools_s[at]


@dataclass
class Served:
    """A project that runs on the simulated fleet."""

    events: Events
    fleet: Fleet
    run: str
    requests: list[Request]
    history: dict[str, int] = field(default_factory=dict)

    def follow(self, steps: Steps, then: Callable[[], None]) -> None:
        """Run the steps in order, then call `then`."""
        step = next(steps, None)
        if step is None:
            then()
        elif isinstance(step, Say):
            self.ask(step, lambda: self.follow(steps, then))
        elif isinstance(step, list):
            left = [len(step)]

            def one_done() -> None:
                left[0] -= 1
                if not left[0]:
                    self.follow(steps, then)

            for each in step:
                self.follow(each, one_done)
        else:
            self.events.at(self.events.now + step, lambda: self.follow(steps, then))

    def ask(self, say: Say, then: Callable[[], None]) -> None:
        """Send a request; call `then` at its end."""
        before = self.history.get(say.thread, 0)
        prompt = before + say.tokens + (0 if before else _BRIEF_TOKENS)
        self.history[say.thread] = prompt + say.answer
        request = Request(
            f"r{len(self.requests)}", SessionKey(DEFAULT_TENANT, f"{self.run}:{say.thread}"), bool(before), prompt,
            before, say.answer,
            self.events.now, lambda r: then(), group=self.run, hop=Hop(WORKFLOW, say.agent, self.run),
        )  # fmt: skip
        self.requests.append(request)
        self.fleet.ask(request)


def serve(
    kind: NodeKind,
    nodes: int,
    variant: Variant,
    files: int,
    teams: int,
    projects: int,
    seed: int,
    lengths: TeamLengths = LENGTHS,
) -> dict[str, Any]:
    """Run `teams` teams with `projects` projects each, after one uncounted. Returns their latencies."""
    events = Events()
    fleet = Fleet(events, kind, nodes, variant)
    took: list[float] = []
    requests: list[Request] = []
    counted: list[int] = []
    left = [teams]

    def next_project(member: int, number: int) -> None:
        if number > projects:
            left[0] -= 1
            return
        began = events.now
        served = Served(events, fleet, f"t{member}-{number}", requests)
        first = len(requests)

        def done() -> None:
            if number:
                took.append(events.now - began)
                counted.append(first)
            next_project(member, number + 1)

        served.follow(team(draw(files, seed * 10_000 + 100 * member + number, lengths)), done)

    for member in range(teams):
        events.at(3.0 * member, lambda member=member: next_project(member, 0))
    events.run(lambda: not left[0])
    fleet.validate()
    ended = [r for r in requests if r.end_s >= 0 and not r.session.session_id.split(":")[0].endswith("-0")]
    returning = [r for r in ended if r.turn]
    return latencies(ended) | {
        "teams": teams,
        "project_mean_s": float(np.mean(took)),
        "project_p95_s": float(np.percentile(took, 95)),
        "cached_share_returning": sum(r.cached_tokens for r in returning) / sum(r.history_tokens for r in returning),
        "hints": sum(fleet.control.hints.values()),
        "virtual_s": events.now,
    }
