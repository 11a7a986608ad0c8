"""A fact a session, many sessions at a time: the same answers without a cache, cold, warm and after a restart, and no
fact of another."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from bench.needle_ladder import ladder
from bench.needle_ladder.sessions import APART, distinct_codes, make_sessions
from loadtest.client import Outcome

MODEL = Path(os.environ.get("UPBEAT_TEST_MODEL", Path(__file__).parents[2] / "models" / "demo"))


@pytest.mark.stack
@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.timeout(280)
def test_two_dozen_sessions_climb_the_ladder(tmp_path: Path) -> None:
    climb(tmp_path, 24)


@pytest.mark.stack
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_three_hundred_sessions_climb_the_ladder(tmp_path: Path) -> None:
    climb(tmp_path, 300)


def climb(directory: Path, count: int) -> None:
    sessions, arms = ladder.climb(MODEL, directory, count=count, seed=1, concurrency=16)
    counted = ladder.figures(sessions, arms)
    print(counted)
    failed = [line for line, holds in ladder.verdicts(counted).items() if not holds]
    shown = [*ladder.differences(arms)[:10], *(line for arm in arms for line in ladder.leaks(sessions, arm)[:10])]
    assert not failed, "\n".join([*failed, *shown])


def test_a_leak_and_a_changed_answer_are_told() -> None:
    sessions = make_sessions(20, 1)
    exact = {(s.session_id, turn): answer for s in sessions for turn, answer in enumerate(s.answers)}

    def arm(name: str, texts: dict[tuple[str, int], str]) -> ladder.Arm:
        outcomes = {(s, t): Outcome(s, t, 0.0, prompt_tokens=100, text=text) for (s, t), text in texts.items()}
        return ladder.Arm(name, outcomes)

    mixed_up = exact | {(sessions[0].session_id, 0): sessions[1].answers[0]}
    wrong = exact | {(sessions[0].session_id, 0): "The code of the garage is 1."}
    counted = ladder.figures(
        sessions, [arm("off", exact), arm("cold", mixed_up), arm("warm", wrong), arm("restarted", exact)]
    )
    assert [a["leaked"] for a in counted.values()] == [0, 1, 0, 0]
    assert [a["identical"] for a in counted.values()] == [60, 59, 59, 60]
    verdicts = list(ladder.verdicts(counted).values())
    assert verdicts[:2] == [False, False]


def test_sessions_of_a_family_differ_in_their_codes_only() -> None:
    sessions = make_sessions(300, 1)
    codes = [code for s in sessions for code in s.own]
    assert len(set(codes)) == 600
    blanked = [str(s.history).replace(s.own[0], "").replace(s.own[1], "") for s in sessions[:20]]
    assert len(set(blanked)) == 2
    assert len({str(s.history[:4]) for s in sessions}) == 1


def test_codes_differ_in_several_places() -> None:
    codes = distinct_codes(random.Random(3), 200)
    assert all(sum(x != y for x, y in zip(a, b, strict=True)) >= APART for i, a in enumerate(codes) for b in codes[:i])
