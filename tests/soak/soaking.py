"""What soaks share: work at once, kills, looks at what processes hold, and the judgement at rest."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx
import openai
import psutil

from loadtest.client import Outcome
from loadtest.stack import Stack
from runtime.clock import RealClock
from runtime.config_file import load_config
from storelink.arena_sharing import arenas_of
from tests.e2e.chat import Chat
from tests.soak.leaks import Held, held_at_rest, leaks, look, metrics, services

MINUTES = float(os.environ.get("UPBEAT_SOAK_MINUTES", "4"))
SEED = int(os.environ.get("UPBEAT_SOAK_SEED", str(random.randrange(10_000))))

#: The share of the time in which processes are killed; what they hold is compared over the rest.
FAULTY = 0.5
#: Seconds between two kills, at least and at most; and between two looks.
KILL_EVERY_S, LOOK_EVERY_S = (10.0, 30.0), 3.0
VICTIMS = ("worker-0", "worker-1", "kvstore-0", "kvstore-1", "scheduler")
REST_S = 90.0
#: Sessions that are deleted at once.
ERASING = 8


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


def run_together(soak: Soak, work: Sequence[Callable[[], None]], seconds: float) -> None:
    """Do all of this work at once; it takes so long."""
    threads = [threading.Thread(target=_guarded, args=(soak, doing), daemon=True) for doing in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + 300)
        assert not thread.is_alive(), "the load does not end"


def _guarded(soak: Soak, doing: Callable[[], None]) -> None:
    try:
        doing()
    except BaseException as e:
        soak.failures.append(e)
        raise


def talk(
    stack: Stack,
    soak: Soak,
    number: int,
    lines: list[str],
    expected: list[str],
    until: float,
    *,
    model: str = "",
    hinted: float = 0.0,
    pause_s: float = 0.0,
) -> None:
    """The same conversation under one name after the other, and sometimes under the name it had. hinted: share of turns
    with a hint before. pause_s: at most, between turns."""
    draw = random.Random(f"{SEED} talk {number}")
    name = f"talk-{number}-0"
    while time.monotonic() < until:
        if draw.random() < 0.7:
            name = f"talk-{number}-{soak.talks}"
        chat = Chat(stack.url, name, model=model)
        for line, answer in zip(lines, expected, strict=True):
            before = list(chat.messages)
            time.sleep(draw.random() * pause_s)
            if draw.random() < hinted:
                with contextlib.suppress(httpx.HTTPError, AssertionError):  # the scheduler may be away
                    chat.advise()
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


def kills(stack: Stack, soak: Soak, until: float) -> None:
    """Kill one process after the other, until then."""
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


def looks(stack: Stack, soak: Soak, begins: float, until: float) -> None:
    """Look at what the processes hold, from one time to another."""
    time.sleep(max(0.0, begins - time.monotonic()))
    while set(metrics(stack)) != {*VICTIMS, "gateway"} and time.monotonic() < until:
        time.sleep(0.5)  # who was killed last still starts: what it takes for that is no leak
    while time.monotonic() < until:
        soak.looks.append(look(stack))
        time.sleep(max(LOOK_EVERY_S, MINUTES))


def at_rest(stack: Stack, soak: Soak) -> None:
    """Nothing is held, nothing has grown."""
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


def erase_everything(stack: Stack, unlisted: Iterable[str] = ()) -> None:
    """Sessions that are deleted leave no page and no slot behind. unlisted: sessions of which perhaps no turn ended."""
    before = used(stack)
    with httpx.Client(base_url=stack.url, timeout=30) as http:
        for session in unlisted:
            assert http.delete(f"/v1/sessions/{session}").status_code in (200, 404)
        while known := http.get("/v1/sessions?limit=1000").json()["data"]:
            with ThreadPoolExecutor(ERASING) as pool:
                for status in pool.map(lambda session: http.delete(f"/v1/sessions/{session['id']}").status_code, known):
                    assert status in (200, 404)
    deadline = time.monotonic() + REST_S
    while over := {name: left for name, left in used(stack).items() if left}:
        assert time.monotonic() < deadline, f"bytes of pages or slots that no session has: {over}, of {before}"
        time.sleep(1.0)


def used(stack: Stack) -> dict[str, float]:
    """Bytes of HBM and DRAM that are not free, by service."""
    names = {"worker": 'upbeat_worker_used_bytes{tier="hbm"}', "kvstore": 'upbeat_kvstore_used_bytes{tier="dram"}'}
    found = metrics(stack)
    return {service: samples[names[service[:-2]]] for service, samples in found.items() if service[:-2] in names}


def stop_and_check(stack: Stack) -> None:
    """Stop; no process and no arena is left."""
    config = load_config(stack.config_file, {"data": str(stack.data), "nodes": {"count": stack.nodes}})
    arenas = [path for n in range(stack.nodes) for path in arenas_of(config.node(n).arena_stem)]
    assert len(arenas) == stack.nodes
    pids = {service: process.pid for service, process in services(stack).items()}
    stack.stop()
    assert not [p for p in pids.values() if psutil.pid_exists(p)], f"processes outlive their stack: {pids}"
    assert not [a for a in arenas if a.exists()], "an arena outlives its stack"
