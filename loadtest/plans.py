"""The vocabulary of a planned load: who says what, when, in which conversation, and what hints go before it. Data only.

A plan says nothing of any server. `loadtest.workload` makes plans from traces, `loadtest.agents` from a workflow, `loadtest.variants`
changes them, `loadtest.client` carries them out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from loadtest.traces import Message


@dataclass(frozen=True, slots=True)
class HintPlan:
    """A turn's hint. offset_s: seconds from the moment when typing starts, negative for earlier. expected: whether it says when the
    request comes. A hint that would come no sooner than its request is not sent."""

    offset_s: float = 0.0
    expected: bool = True


@dataclass(frozen=True, slots=True)
class Pretence:
    """A hint for nothing: somebody begins to type in conversation `session_id`, `delay_s` after the turn's request, and gives up."""

    delay_s: float
    session_id: str


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """One request to come.

    text: what the user says. answer_tokens: `max_tokens` of the request. arrival_s: planned, from the load's start.
    typing_s: from the first key (the hint) to the request. reading_s: how long its answer is read (in a closed loop).
    after: turns (session id, number) of the same job whose answers this one needs; then `typing_s` is counted from the last of their ends.
    messages: what is said instead of `text`, in full. extra, headers: added to the request. hint: None where none is sent.
    """

    text: str
    answer_tokens: int
    arrival_s: float
    typing_s: float
    reading_s: float = 0.0
    hint: HintPlan | None = HintPlan()
    pretences: tuple[Pretence, ...] = ()
    after: tuple[tuple[str, int], ...] = ()
    messages: tuple[Message, ...] = ()
    extra: tuple[tuple[str, Any], ...] = ()
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def says(self) -> list[dict[str, str]]:
        """What this turn adds to its conversation, as messages of the API."""
        return [{"role": m.role, "content": m.content} for m in self.messages] or [{"role": "user", "content": self.text}]


@dataclass(frozen=True, slots=True)
class PlannedSession:
    """A conversation to come, its turns in order.

    job: what is held together: a person of a closed loop begins all sessions of a job at once, and the next job when all have ended.
    Empty: the session is a job of its own. model: a name that targets map to theirs; empty: the target's first.
    """

    session_id: str
    turns: tuple[PlannedTurn, ...]
    priority: int = 0
    tenant: str = ""
    model: str = ""
    job: str = ""


Job = tuple[PlannedSession, ...]


def jobs(sessions: Iterable[PlannedSession]) -> list[Job]:
    """The jobs in order; sessions of one job must stand together."""
    return [tuple(group) for _, group in groupby(sessions, key=lambda s: s.job or s.session_id)]


def turns_of(sessions: Iterable[PlannedSession]) -> int:
    """How many requests a plan has."""
    return sum(len(s.turns) for s in sessions)
