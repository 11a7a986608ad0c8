"""The data types of a planned load: sessions, their turns, and hints. Independent of any server.

`loadtest.workload` makes plans from traces, `loadtest.agents` from a workflow; `loadtest.variants` changes them,
`loadtest.users` sends them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from loadtest.traces import Message


@dataclass(frozen=True, slots=True)
class HintPlan:
    """A turn's hint. offset_s: from the start of typing, negative for earlier. expected: whether it gives the expected
    arrival. A hint after its request is not sent."""

    offset_s: float = 0.0
    expected: bool = True


@dataclass(frozen=True, slots=True)
class Pretence:
    """A spurious hint, `delay_s` after the turn's request: a user starts typing in `session_id` and gives up."""

    delay_s: float
    session_id: str


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """One planned request.

    text: the user's new text. answer_tokens: `max_tokens`. arrival_s: planned, from the load's start. typing_s: from
    the first key (the hint) to the request. reading_s: of its answer, in a closed loop. after: turns (session id,
    number) of the same job whose answers this one needs; `typing_s` then counts from the last of their ends. messages:
    replace `text`. extra, headers: added to the request. hint: None: not sent.
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
        """The messages that this turn adds to its conversation."""
        return [{"role": m.role, "content": m.content} for m in self.messages] or [
            {"role": "user", "content": self.text}
        ]


@dataclass(frozen=True, slots=True)
class PlannedSession:
    """A planned conversation, its turns in order.

    job: sessions of one job start together; a user of a closed loop starts the next job when all have ended. Empty: the
    session is its own job. model: a name that targets map to theirs; empty: the target's default.
    """

    session_id: str
    turns: tuple[PlannedTurn, ...]
    priority: int = 0
    tenant: str = ""
    model: str = ""
    job: str = ""


Job = tuple[PlannedSession, ...]


def jobs(sessions: Iterable[PlannedSession]) -> list[Job]:
    """The jobs in order. Sessions of one job must be adjacent."""
    return [tuple(group) for _, group in groupby(sessions, key=lambda s: s.job or s.session_id)]


def turns_of(sessions: Iterable[PlannedSession]) -> int:
    """Number of requests of a plan."""
    return sum(len(s.turns) for s in sessions)
