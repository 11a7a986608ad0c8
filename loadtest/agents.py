"""Agent workflows as planned loads: teams like MetaGPT's, with tool calls between requests (SYMPHONY, section 4 and
figure 16).

manager -> architect -> an engineer a file, all at once -> a reviewer a file -> (the engineer again -> the reviewer
again), up to `MAX_REVIEWS` reviews -> manager. Each agent's thread is a session, a project is a job. A turn
begins when the answers that it needs have come and a tool has run. Requests name their workflow and agent; the server
derives hints from that. Pure: a project depends on its seed alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from loadtest.plans import PlannedSession, PlannedTurn
from loadtest.prompts import block_words
from loadtest.traces import Message

WORKFLOW = "software-team"
MAX_REVIEWS = 3
#: The chance that a review sends the file back.
_SENT_BACK = 0.6
_BRIEF_TOKENS = 300
#: First block id of projects' texts, above those of traces and their salted copies.
_PROJECTS = 1 << 60


@dataclass(frozen=True, slots=True)
class TeamLengths:
    """Ranges, drawn from uniformly: lengths of texts in tokens, and seconds of a tool between two requests."""

    brief: tuple[int, int] = (600, 900)
    design: tuple[int, int] = (1500, 3000)
    file: tuple[int, int] = (2000, 4000)
    note: tuple[int, int] = (40, 120)
    answer: tuple[int, int] = (16, 40)
    tool_s: tuple[float, float] = (1.5, 5.0)


def team_projects(
    count: int,
    files: int,
    seed: int,
    lengths: TeamLengths | None = None,
    *,
    every_s: float = 0.0,
    time_scale: float = 1.0,
) -> list[PlannedSession]:
    """`count` projects of `files` files each; in an open loop one starts every `every_s` seconds. All times are
    multiplied by `time_scale`."""
    found = []
    for number in range(count):
        project = _Project(
            f"team{seed}-{number}",
            random.Random(f"{seed} {number}"),
            lengths or TeamLengths(),
            number * every_s,
            time_scale,
        )
        found += project.sessions(files)
    return found


class _Project:
    """One project being drawn."""

    def __init__(
        self, name: str, draw: random.Random, lengths: TeamLengths, starts_s: float, time_scale: float
    ) -> None:
        self._name, self._draw, self._lengths = name, draw, lengths
        self._starts_s, self._time_scale = starts_s, time_scale
        self._turns: dict[str, list[PlannedTurn]] = {}
        self._block = _PROJECTS + draw.getrandbits(48) * 4096

    def sessions(self, files: int) -> list[PlannedSession]:
        lengths = self._lengths
        brief = self._ask("manager", "manager", lengths.brief, ())
        design = self._ask("architect", "architect", lengths.design, (brief,))
        reviewed = [self._file(number, design) for number in range(files)]
        self._ask("manager", "manager", lengths.note, tuple(reviewed))
        return [
            PlannedSession(self._session(thread), tuple(turns), job=self._name) for thread, turns in self._turns.items()
        ]

    def _file(self, number: int, design: tuple[str, int]) -> tuple[str, int]:
        reviews = 1
        while reviews < MAX_REVIEWS and self._draw.random() < _SENT_BACK:
            reviews += 1
        last = design
        for review in range(reviews):
            for agent, first in (("engineer", self._lengths.design), ("reviewer", self._lengths.file)):
                last = self._ask(agent, f"{agent}-{number}", self._lengths.note if review else first, (last,))
        return last

    def _ask(
        self, agent: str, thread: str, span: tuple[int, int], after: tuple[tuple[str, int], ...]
    ) -> tuple[str, int]:
        turns = self._turns.setdefault(thread, [])
        self._block += 1
        said = [Message("user", " ".join(block_words(self._block, self._draw.randint(*span))))]
        if not turns:  # an agent's system prompt is the same in every project
            said.insert(0, Message("system", " ".join(block_words(sum(agent.encode()), _BRIEF_TOKENS))))
        turns.append(
            PlannedTurn(
                text=said[-1].content,
                answer_tokens=self._draw.randint(*self._lengths.answer),
                arrival_s=self._starts_s * self._time_scale,
                typing_s=self._draw.uniform(*self._lengths.tool_s) * self._time_scale if after else 0.0,
                hint=None,
                after=after,
                messages=tuple(said),
                headers=(("X-Upbeat-Workflow", WORKFLOW), ("X-Upbeat-Agent", agent), ("X-Upbeat-Run", self._name)),
            )
        )
        return self._session(thread), len(turns) - 1

    def _session(self, thread: str) -> str:
        return f"{self._name}:{thread}"
