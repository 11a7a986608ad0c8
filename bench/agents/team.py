"""The load: a MetaGPT-like team that writes a program of several files.

manager -> architect -> one engineer per file in parallel -> one reviewer per file -> (engineer -> reviewer again, up to
three reviews) -> manager. The seed determines a project, so both arms of a repetition do the same work with different
words and share no cache.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import aiohttp

from loadtest.agents import TeamLengths
from loadtest.client import Endpoint, Outcome, ask
from loadtest.prompts import block_words
from loadtest.stack import StackError
from runtime.clock import RealClock

CLOCK = RealClock()
WORKFLOW = "software-team"
MAX_REVIEWS = 3
#: Probability that a review returns the file.
SENT_BACK = 0.6


@dataclass(frozen=True)
class File:
    """A file's draw: lengths in tokens, tool times and number of reviews."""

    task: int
    design: int
    reviews: int
    notes: tuple[int, ...]
    answers: tuple[int, ...]
    tools_s: tuple[float, ...]


@dataclass(frozen=True)
class Project:
    """The draw of one run."""

    brief: int
    design: int
    answers: tuple[int, int, int]
    tools_s: tuple[float, float, float]
    files: tuple[File, ...]


def draw(files: int, seed: int, lengths: TeamLengths) -> Project:
    """Draw the project of `seed`."""
    r = random.Random(seed)

    def tokens(span: tuple[int, int]) -> int:
        return r.randint(*span)

    def file() -> File:
        reviews = 1
        while reviews < MAX_REVIEWS and r.random() < SENT_BACK:
            reviews += 1
        steps = 2 * reviews
        notes, answers = (tuple(tokens(span) for _ in range(steps)) for span in (lengths.note, lengths.answer))
        return File(
            tokens(lengths.file),
            tokens(lengths.design),
            reviews,
            notes,
            answers,
            tuple(r.uniform(*lengths.tool_s) for _ in range(steps)),
        )

    team = [tokens(lengths.answer) for _ in range(3)]
    waits = [r.uniform(*lengths.tool_s) for _ in range(3)]
    brief, design = tokens(lengths.brief), tokens(lengths.design)
    return Project(
        brief, design, (team[0], team[1], team[2]), (waits[0], waits[1], waits[2]), tuple(file() for _ in range(files))
    )


@dataclass
class Team:
    """One run of a project.

    hinted: requests carry their workflow, agent and run. words: start of the run's texts, so that runs share only the
    agents' briefs.
    """

    endpoint: Endpoint
    http: aiohttp.ClientSession
    project: Project
    run: str
    words: int
    hinted: bool
    outcomes: list[tuple[str, bool, Outcome]] = field(default_factory=list)
    _histories: dict[str, list[dict[str, str]]] = field(default_factory=dict)

    async def work(self) -> float:
        """Run the project. Returns its seconds end to end. Raises StackError if a request fails."""
        p, began = self.project, CLOCK.now()
        await self._ask("manager", "manager", p.brief, p.answers[0])
        await CLOCK.sleep(p.tools_s[0])
        await self._ask("architect", "architect", p.design, p.answers[1])
        await CLOCK.sleep(p.tools_s[1])
        async with asyncio.TaskGroup() as group:
            for number, file in enumerate(p.files):
                group.create_task(self._file(number, file))
        await CLOCK.sleep(p.tools_s[2])
        await self._ask("manager", "manager", 60, p.answers[2])
        return CLOCK.now() - began

    async def _file(self, number: int, file: File) -> None:
        for review in range(file.reviews):
            for step, (agent, first) in enumerate((("engineer", file.design), ("reviewer", file.task))):
                at = 2 * review + step
                await self._ask(agent, f"{agent}-{number}", file.notes[at] if review else first, file.answers[at])
                if at + 1 < 2 * file.reviews:
                    await CLOCK.sleep(file.tools_s[at])

    async def _ask(self, agent: str, thread: str, tokens: int, answer: int) -> None:
        """Send one request in an agent's thread. A thread starts with the agent's brief, which is the same in every
        run."""
        returns = thread in self._histories
        brief = {"role": "system", "content": " ".join(block_words(sum(agent.encode()), 300))}
        history = self._histories.setdefault(thread, [brief])
        self.words += 1
        history.append({"role": "user", "content": " ".join(block_words(self.words, tokens))})
        session = f"{self.run}:{thread}"
        headers = (
            {"X-Upbeat-Workflow": WORKFLOW, "X-Upbeat-Agent": agent, "X-Upbeat-Run": self.run} if self.hinted else {}
        )
        outcome = Outcome(session, len(history) // 2, 0.0, sent_s=CLOCK.now())
        await ask(self.http, self.endpoint, history, answer, session, outcome, CLOCK.now, headers=headers)
        if outcome.error is not None:
            raise StackError(f"{session}: {outcome.error}")
        history.append({"role": "assistant", "content": outcome.text})
        self.outcomes.append((agent, returns, outcome))
