"""Mixed load for as long as one asks, with kills in between; then nothing may be held, nothing may have grown, and all
answers were right.

    make soak                                       # four minutes
    UPBEAT_SOAK_MINUTES=240 make soak               # four hours
    UPBEAT_SOAK_SEED=7 make soak                    # other faults, at other times

Users hint early, late, for nothing, or not at all; some are urgent; teams of agents work; and a few conversations,
whose answers a cold node gave before, are held again and again: greedy answers are the same whatever is killed. In the
last part nothing is killed, and what the processes hold is compared with how that part began.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from loadtest.agents import TeamLengths, team_projects
from loadtest.client import Endpoint, Outcome
from loadtest.generate_trace import generated_requests
from loadtest.habits import Habits
from loadtest.plans import PlannedSession
from loadtest.sessions import find_sessions
from loadtest.stack import Stack
from loadtest.users import Loop, run_load
from loadtest.variants import with_habits, with_priorities
from loadtest.workload import fitting_scale, plan, salted
from runtime.clock import RealClock
from tests.e2e.chat import Chat, script
from tests.soak.soaking import (
    FAULTY,
    MINUTES,
    SEED,
    VICTIMS,
    Soak,
    at_rest,
    erase_everything,
    kills,
    looks,
    run_together,
    stop_and_check,
    talk,
)

MODEL = Path(os.environ.get("UPBEAT_TEST_MODEL", Path(__file__).parents[2] / "models" / "demo"))
pytestmark = [pytest.mark.stack, pytest.mark.soak, pytest.mark.timeout(60 * MINUTES + 900)]

USERS, TEAMS, TALKS = 6, 1, 2
#: A request of users and agents may end with an error only where so many kills fell into its time. Who was killed so
#: long before it counts, as it may still have been away. (Seed 7213: 1,616 requests, six kills, none failed.)
KILLS_OF_A_FAILURE, BACK_S = 2, 10.0
#: Small, so that everything is pushed out of everything.
SIZES = {"hbm_gib": 0.06, "dram_gib": 0.06}


def test_a_stack_stays_correct_for_as_long_as_it_runs(tmp_path: Path) -> None:
    print(f"\nseed {SEED}, {MINUTES:g} minutes")
    lines = [script(seed, turns=5) for seed in range(TALKS)]
    with Stack(model=MODEL, nodes=1, cache=False, hbm_gib=0.25, dram_gib=0.25) as cold:
        expected = [[a.text for a in _said(Chat(cold.url, f"cold-{i}"), said)] for i, said in enumerate(lines)]
    soak, seconds = Soak(), 60 * MINUTES
    with Stack(model=MODEL, nodes=2, directory=tmp_path, **SIZES) as stack:
        until = time.monotonic() + seconds
        work: list[Callable[[], None]] = [
            lambda: _users(stack, soak, seconds),
            lambda: _agents(stack, soak, seconds),
            lambda: kills(stack, soak, until - (1 - FAULTY) * seconds),
            lambda: looks(stack, soak, until - (1 - FAULTY) * seconds + 5.0, until),
            *(lambda i=i: talk(stack, soak, i, lines[i], expected[i], until) for i in range(TALKS)),  # type: ignore[misc]
        ]
        run_together(soak, work, seconds)
        _judge(stack, soak)
        stop_and_check(stack)


def _judge(stack: Stack, soak: Soak) -> None:
    failed = [(began_s, o) for began_s, o in soak.outcomes if o.error is not None]
    victims = [name for _, name in soak.killed]
    print(f"{len(soak.outcomes)} requests, {len(failed)} failed; {soak.talks} talks; killed {', '.join(victims)}")
    for error in sorted({o.error or "" for _, o in failed})[:5]:
        print(f"  {error[:160]}")
    assert not soak.failures, soak.failures
    assert not soak.wrong, soak.wrong
    assert soak.talks and len(soak.outcomes) > 10 * MINUTES and len(set(victims)) >= min(len(VICTIMS), int(MINUTES))
    assert not (inexcusable := [o for began_s, o in failed if _kills_during(soak, began_s, o) < KILLS_OF_A_FAILURE]), (
        inexcusable
    )
    at_rest(stack, soak)
    erase_everything(stack)


def _kills_during(soak: Soak, began_s: float, o: Outcome) -> int:
    return sum(began_s + o.sent_s - BACK_S <= at_s <= began_s + o.end_s for at_s, _ in soak.killed)


# ---- what goes on at once -------------------------------------------------------------------------------------------


def _users(stack: Stack, soak: Soak, seconds: float) -> None:
    sessions = find_sessions(generated_requests(400, SEED, burstiness=0.4, lengths="zipf", mean_prompt_tokens=6000))
    scale = fitting_scale(sessions, 3000, 40)
    planned: list[PlannedSession] = []
    for salt in range(1, 2 + int(MINUTES)):
        planned += plan(salted(sessions, salt), length_scale=scale, time_scale=0.1, seed=SEED, max_answer_tokens=40)
    habits = Habits(missed=0.1, late=0.2, late_s=3.0, early=0.1, spurious=0.4)
    planned = with_priorities(with_habits(planned, habits, SEED, 0.1), 0.1, SEED)
    _hold(stack, soak, planned, Loop(USERS, seconds, 2.0, SEED))


def _agents(stack: Stack, soak: Soak, seconds: float) -> None:
    lengths = TeamLengths((60, 120), (100, 300), (200, 400), (20, 40), (8, 24), (0.2, 1.0))
    _hold(stack, soak, team_projects(20 + int(40 * MINUTES), 3, SEED, lengths), Loop(TEAMS, seconds, 0.0, SEED))


def _hold(stack: Stack, soak: Soak, planned: list[PlannedSession], loop: Loop) -> None:
    endpoint = Endpoint(
        stack.url,
        stack.model_name(),
        hints=True,
        priorities=True,
        workflows=True,
        body={"ignore_eos": True},
        timeout_s=120,
    )
    clock = RealClock()
    began_s = clock.now()
    asyncio.run(run_load(endpoint, planned, clock, lambda outcome: soak.outcomes.append((began_s, outcome)), loop))


def _said(chat: Chat, lines: list[str]) -> list:
    return [chat.say(line) for line in lines]
