"""Changes to a planned load: missed, late, early or spurious hints; urgent conversations; several models and tenants.
Pure.

Each draw depends only on the seed, the session and the turn, so that changes do not affect each other's draws.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from loadtest.habits import SPURIOUS_WITHIN_S, Habits, draw
from loadtest.plans import HintPlan, PlannedSession, PlannedTurn, Pretence


def with_habits(
    sessions: Sequence[PlannedSession], habits: Habits, seed: int, time_scale: float = 1.0
) -> list[PlannedSession]:
    """The plan with hints by `habits`. Spurious hints are for earlier conversations of the same tenant."""
    made: list[PlannedSession] = []
    earlier: dict[str, list[str]] = {}
    for session in sessions:
        past = earlier.setdefault(session.tenant, [])
        turns = tuple(_hinted(session, n, turn, habits, seed, time_scale, past) for n, turn in enumerate(session.turns))
        made.append(replace(session, turns=turns))
        past.append(session.session_id)
    return made


def _hinted(
    session: PlannedSession,
    number: int,
    turn: PlannedTurn,
    habits: Habits,
    seed: int,
    time_scale: float,
    past: Sequence[str],
) -> PlannedTurn:
    chance = random.Random(f"{seed} {session.session_id} {number}").random
    drawn = draw(habits, chance)
    pretences = tuple(
        [
            Pretence(chance() * SPURIOUS_WITHIN_S * time_scale, past[int(chance() * len(past))])
            for _ in range(drawn.spurious if past else 0)
        ]
    )
    hint = None if drawn.missed else HintPlan(drawn.offset_s * time_scale, habits.expected)
    return replace(turn, hint=hint, pretences=pretences)


def with_priorities(
    sessions: Sequence[PlannedSession], urgent: float, seed: int, priority: int = -1
) -> list[PlannedSession]:
    """The plan with `priority` for a share `urgent` of its jobs (SYMPHONY, figure 21)."""
    return [
        replace(s, priority=priority)
        if random.Random(f"{seed} urgent {s.job or s.session_id}").random() < urgent
        else s
        for s in sessions
    ]


def with_shares(
    sessions: Sequence[PlannedSession], shares: Mapping[str, float], seed: int, what: str
) -> list[PlannedSession]:
    """The plan with a tenant or model (`what`) for each job, drawn from the names in `shares` in these proportions.

    Raises ValueError for another `what`.
    """
    if what not in ("tenant", "model"):
        raise ValueError(f"{what!r} is neither tenant nor model")
    if not shares:
        return list(sessions)
    names, weights = list(shares), list(shares.values())
    made = []
    for s in sessions:
        (name,) = random.Random(f"{seed} {what} {s.job or s.session_id}").choices(names, weights)
        made.append(replace(s, tenant=name) if what == "tenant" else replace(s, model=name))
    return made
