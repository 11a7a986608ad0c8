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
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import openai
import psutil
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
from tests.soak.leaks import Held, held_at_rest, leaks, look, metrics, services

MINUTES = float(os.environ.get("UPBEAT_SOAK_MINUTES", "4"))
SEED = int(os.environ.get("UPBEAT_SOAK_SEED", str(random.randrange(10_000))))
MODEL = Path(os.environ.get("UPBEAT_TEST_MODEL", Path(__file__).parents[2] / "models" / "demo"))
pytestmark = [pytest.mark.stack, pytest.mark.soak, pytest.mark.timeout(60 * MINUTES + 900)]

#: The share of the time in which processes are killed; what they hold is compared over the rest.
FAULTY = 0.5
#: Seconds between two kills, at least and at most; and between two looks.
KILL_EVERY_S, LOOK_EVERY_S = (10.0, 30.0), 3.0
VICTIMS = ("worker-0", "worker-1", "kvstore-0", "kvstore-1", "scheduler")
USERS, TEAMS, TALKS = 6, 1, 2
#: A request of users and agents may end with an error only where so many kills fell into its time. Who was killed so
#: long before it counts, as it may still have been away. (Seed 7213: 1,616 requests, six kills, none failed.)
KILLS_OF_A_FAILURE, BACK_S = 2, 10.0
REST_S = 90.0
#: Sessions that are deleted at once.
ERASING = 8
#: Small, so that everything is pushed out of everything.
SIZES = {"hbm_gib": 0.06, "dram_gib": 0.06}


@dataclass
class Soak:
    """What a soak sees."""

    #: With when their load began, by this process's clock.
    outcomes: list[tuple[float, Outcome]] = field(default_factory=list)
    talks: int = 0
    wrong: list[str] = field(default_factory=list)
    killed: list[tuple[float, str]] = field(default_factory=list)
    looks: list[dict[str, Held]] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)


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
            lambda: _kills(stack, soak, until - (1 - FAULTY) * seconds),
            lambda: _looks(stack, soak, until - (1 - FAULTY) * seconds + 5.0, until),
            *(lambda i=i: _talk(stack, soak, i, lines[i], expected[i], until) for i in range(TALKS)),  # type: ignore[misc]
        ]
        threads = [threading.Thread(target=_guarded, args=(soak, doing), daemon=True) for doing in work]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(seconds + 300)
            assert not thread.is_alive(), "the load does not end"
        _judge(stack, soak)
        arenas = [
            path for path in Path("/dev/shm").iterdir() if path.name.startswith("upbeat-") and _is_of(stack, path)
        ]
        pids = {service: process.pid for service, process in services(stack).items()}
        stack.stop()
        assert not [p for p in pids.values() if psutil.pid_exists(p)], f"processes outlive their stack: {pids}"
        assert not [a for a in arenas if a.exists()], "an arena outlives its stack"


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
    # At rest nothing is held; the system gets the time that its timers take.
    deadline = time.monotonic() + REST_S
    while (held := held_at_rest(metrics(stack))) and time.monotonic() < deadline:
        time.sleep(1.0)
    assert not held, held
    assert set(metrics(stack)) == set(services(stack)) == {*VICTIMS, "gateway"}
    assert len(soak.looks) >= 6 and set(soak.looks[-1]) == {*VICTIMS, "gateway"}
    for service, last in sorted(soak.looks[-1].items()):
        print(
            f"  {service}: {last.memory_bytes >> 20} MiB, {last.descriptors} descriptors, {last.threads} threads, "
            f"{last.tasks} tasks"
        )
    assert not (grown := leaks(soak.looks)), grown
    _erase_everything(stack)


def _kills_during(soak: Soak, began_s: float, o: Outcome) -> int:
    return sum(began_s + o.sent_s - BACK_S <= at_s <= began_s + o.end_s for at_s, _ in soak.killed)


def _erase_everything(stack: Stack) -> None:
    """Sessions that are deleted leave no page and no slot behind."""
    before = _used(stack)
    with httpx.Client(base_url=stack.url, timeout=30) as http:
        while known := http.get("/v1/sessions?limit=1000").json()["data"]:
            with ThreadPoolExecutor(ERASING) as pool:
                for status in pool.map(lambda session: http.delete(f"/v1/sessions/{session['id']}").status_code, known):
                    assert status in (200, 404)
    deadline = time.monotonic() + REST_S
    while over := {name: left for name, left in _used(stack).items() if left}:
        assert time.monotonic() < deadline, f"bytes of pages or slots that no session has: {over}, of {before}"
        time.sleep(1.0)


def _used(stack: Stack) -> dict[str, float]:
    """Bytes of HBM and DRAM that are not free, by service."""
    names = {"worker": 'upbeat_worker_used_bytes{tier="hbm"}', "kvstore": 'upbeat_kvstore_used_bytes{tier="dram"}'}
    found = metrics(stack)
    return {service: samples[names[service[:-2]]] for service, samples in found.items() if service[:-2] in names}


# ---- what goes on at once -------------------------------------------------------------------------------------------


def _guarded(soak: Soak, doing: Callable[[], None]) -> None:
    try:
        doing()
    except BaseException as e:
        soak.failures.append(e)
        raise


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


def _talk(stack: Stack, soak: Soak, number: int, lines: list[str], expected: list[str], until: float) -> None:
    """The same conversation under one name after the other, and sometimes under the name it had."""
    draw = random.Random(f"{SEED} talk {number}")
    name = f"talk-{number}-0"
    while time.monotonic() < until:
        if draw.random() < 0.7:
            name = f"talk-{number}-{soak.talks}"
        chat = Chat(stack.url, name)
        for line, answer in zip(lines, expected, strict=True):
            before = list(chat.messages)
            # a request may be lost with what served it; one that is answered is answered rightly
            for attempt in range(3):
                chat.messages = list(before)
                try:
                    text = chat.say(line).text
                except (openai.APIError, httpx.HTTPError) as e:
                    if attempt == 2:
                        soak.wrong.append(f"{name}: three errors in a row: {e}")
                    time.sleep(1.0)
                    continue
                if text != answer:
                    soak.wrong.append(f"{name}: {text!r} and not {answer!r}")
                break
        soak.talks += 1


def _kills(stack: Stack, soak: Soak, until: float) -> None:
    draw, round_ = random.Random(f"{SEED} kills"), list[str]()
    while True:
        wait_s = draw.uniform(*KILL_EVERY_S)
        if time.monotonic() + wait_s > until:
            return
        time.sleep(wait_s)
        if not round_:  # everybody's turn comes once a round
            round_ = draw.sample(VICTIMS, len(VICTIMS))
        name = round_.pop()
        process = services(stack).get(name)
        if process is not None:
            process.kill()
            soak.killed.append((RealClock().now(), name))


def _looks(stack: Stack, soak: Soak, begins: float, until: float) -> None:
    time.sleep(max(0.0, begins - time.monotonic()))
    while set(metrics(stack)) != {*VICTIMS, "gateway"} and time.monotonic() < until:
        time.sleep(0.5)  # who was killed last still starts: what it takes for that is no leak
    while time.monotonic() < until:
        soak.looks.append(look(stack))
        time.sleep(max(LOOK_EVERY_S, MINUTES))


def _said(chat: Chat, lines: list[str]) -> list:
    return [chat.say(line) for line in lines]


def _is_of(stack: Stack, path: Path) -> bool:
    from runtime.config_file import load_config
    from storelink.arena_sharing import arenas_of

    config = load_config(None, {"data": str(stack.data), "nodes": {"count": stack.nodes}})
    return any(path in arenas_of(config.node(n).arena_stem) for n in range(stack.nodes))
