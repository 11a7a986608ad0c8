"""Runs the ladder: the same sessions with the cache off, cold, warm, and warm after a restart.

Each arm asks every session the same questions over HTTP, several sessions at a time, each turn on the other node than
before; every second session sends hints. HBM and DRAM hold a fraction of the cache, so the later arms read from every
tier. Before the last arm node-0 loses its SSD and node-1 half of its files, so blob is needed too.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from rich.table import Table

from bench.needle_ladder.sessions import Needles, make_sessions
from loadtest.client import Endpoint, Outcome, advise, ask
from loadtest.stack import Stack
from runtime.clock import RealClock
from runtime.config_file import load_config

ARMS = ("off", "cold", "warm", "restarted")
TIERS = ("dram", "ssd", "peer", "blob")
NODES = 2
ANSWER_TOKENS = 24
#: Per node: beside 12 MiB of weights HBM holds a dozen sessions, DRAM three dozen.
HBM_GIB, DRAM_GIB = 0.022, 0.03
#: Makes workers load, although recomputing so small a model is faster.
LOADING = {"kv": {"load_plan": False}}
_ROWS = (
    ("sessions", "sessions"),
    ("answers", "answers"),
    ("exact answers", "exact"),
    ("identical to those without a cache", "identical"),
    ("with another session's fact", "leaked"),
)
CLOCK = RealClock()


@dataclass
class Arm:
    """An arm's outcomes by session and turn, and the cached bytes its requests found by tier."""

    name: str
    outcomes: dict[tuple[str, int], Outcome] = field(default_factory=dict)
    found_bytes: Counter[str] = field(default_factory=Counter)

    def texts(self) -> dict[tuple[str, int], str]:
        """The answers' texts."""
        return {turn: outcome.text for turn, outcome in self.outcomes.items()}


def climb(
    model: Path, directory: Path, *, count: int, seed: int, concurrency: int, say: Callable[[str], None] = print
) -> tuple[list[Needles], list[Arm]]:
    """Run all arms. Raises StackError if a stack does not start, RuntimeError if a request fails."""
    sessions = make_sessions(count, seed)
    arms = []
    with Stack(
        model=model, nodes=NODES, cache=False, directory=directory / "off", hbm_gib=HBM_GIB, dram_gib=DRAM_GIB
    ) as stack:
        arms.append(_run("off", stack, sessions, concurrency, swap=False, say=say))
    on = Stack(
        model=model, nodes=NODES, directory=directory / "on", hbm_gib=HBM_GIB, dram_gib=DRAM_GIB, settings=LOADING
    )
    with on as stack:
        arms.append(_run("cold", stack, sessions, concurrency, swap=False, say=say))
        arms.append(_run("warm", stack, sessions, concurrency, swap=True, say=say))
        stack.stop()
        lost = lose_files(stack)
        say(f"everything stopped; {lost} chunks deleted from SSDs; everything starts again")
        stack.start()
        arms.append(_run("restarted", stack, sessions, concurrency, swap=False, say=say))
    return sessions, arms


def lose_files(stack: Stack) -> int:
    """Delete node-0's SSD files and every other one of node-1. Returns their number."""
    chunks = [sorted(p for p in (stack.data / f"node-{n}" / "ssd").rglob("*") if p.is_file()) for n in range(NODES)]
    doomed = [*chunks[0], *chunks[1][::2]]
    for path in doomed:
        path.unlink()
    return len(doomed)


def _run(
    name: str, stack: Stack, sessions: list[Needles], concurrency: int, *, swap: bool, say: Callable[[str], None]
) -> Arm:
    began, before = CLOCK.now(), found_bytes(stack)
    try:
        arm = Arm(name, asyncio.run(_ask_all(stack, sessions, concurrency, swap)))
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from failed
    arm.found_bytes = found_bytes(stack) - before
    say(f"{name}: {len(arm.outcomes)} answers in {CLOCK.now() - began:.1f} s")
    return arm


async def _ask_all(
    stack: Stack, sessions: list[Needles], concurrency: int, swap: bool
) -> dict[tuple[str, int], Outcome]:
    endpoint = Endpoint(stack.url, stack.model_name(), timeout_s=120)
    outcomes: dict[tuple[str, int], Outcome] = {}
    room = asyncio.Semaphore(concurrency)

    async def talk(http: aiohttp.ClientSession, number: int, session: Needles) -> None:
        messages = list(session.history)
        async with room:
            for turn, question in enumerate(session.asked):
                messages.append({"role": "user", "content": question})
                outcome = Outcome(session.session_id, turn, 0.0, sent_s=CLOCK.now())
                node = f"node-{(number + turn + swap) % NODES}"
                if number % 2:
                    await advise(http, endpoint, session.session_id, None, pin_node=node)
                await ask(
                    http, endpoint, messages, ANSWER_TOKENS, session.session_id, outcome, CLOCK.now, pin_node=node
                )
                if outcome.error is not None or outcome.node != node:
                    raise RuntimeError(
                        f"{session.session_id}, turn {turn}, on {node}: "
                        f"{outcome.error or f'answered by {outcome.node}'}"
                    )
                messages.append({"role": "assistant", "content": outcome.text})
                outcomes[session.session_id, turn] = outcome

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http, asyncio.TaskGroup() as group:
        for number, session in enumerate(sessions):
            group.create_task(talk(http, number, session))
    return outcomes


def found_bytes(stack: Stack) -> Counter[str]:
    """Bytes that requests found below HBM since the stores' start, by tier, of all nodes; empty with cache off."""
    found: Counter[str] = Counter()
    config = load_config(stack.config_file, {"nodes": {"count": NODES}})
    for number in range(NODES):
        try:
            lines = stack.metrics(config.node(number).store_metrics_port).splitlines()
        except OSError:
            continue  # without a cache no store runs
        for line in lines:
            if match := re.fullmatch(r'upbeat_kvstore_hit_bytes_total\{tier="(\w+)"\} (.+)', line):
                found[match[1]] += int(float(match[2]))
    return found


def leaks(sessions: list[Needles], arm: Arm) -> list[str]:
    """Answers that contain another session's code, each with a description."""
    owner = {code: s.session_id for s in sessions for code in s.own}
    return [
        f"{arm.name}, {session}, turn {turn}: {outcome.text!r} has the code of {owner[code]}"
        for (session, turn), outcome in arm.outcomes.items()
        for code in set(re.findall(r"\d+", outcome.text)) & owner.keys()
        if owner[code] != session
    ]


def figures(sessions: list[Needles], arms: list[Arm]) -> dict[str, dict[str, Any]]:
    """Counts of each arm; `identical` compares with the first."""
    exact = {(s.session_id, turn): answer for s in sessions for turn, answer in enumerate(s.answers)}
    baseline = arms[0].texts()
    counted = {}
    for arm in arms:
        texts = arm.texts()
        prompt = sum(o.prompt_tokens for o in arm.outcomes.values())
        counted[arm.name] = {
            "sessions": len(sessions),
            "answers": len(texts),
            "exact": sum(text == exact[turn] for turn, text in texts.items()),
            "identical": sum(text == baseline[turn] for turn, text in texts.items()),
            "leaked": len(leaks(sessions, arm)),
            "cached_share": round(sum(o.cached_tokens or 0 for o in arm.outcomes.values()) / prompt, 4),
            "found_bytes": dict(arm.found_bytes),
        }
    return counted


def verdicts(counted: dict[str, dict[str, Any]]) -> dict[str, bool]:
    """The ladder's requirements, and whether each is met."""
    on = [counted[name] for name in ARMS[1:]]
    sources = {tier for arm in on for tier, size in arm["found_bytes"].items() if size}
    return {
        "every arm gives the answers of the arm without a cache": all(
            arm["identical"] == counted["off"]["answers"] for arm in on
        ),
        "no fact of one session is in another's answer": all(arm["leaked"] == 0 for arm in counted.values()),
        "nine of ten facts are recalled to the last digit": counted["off"]["exact"] >= 0.9 * counted["off"]["answers"],
        "without a cache nothing is cached": counted["off"]["cached_share"] == 0,
        "when warm, most of every prompt is": all(
            counted[name]["cached_share"] >= 0.7 for name in ("warm", "restarted")
        ),
        "it came from DRAM, SSD, the other node and blob": sources >= set(TIERS),
    }


def table(counted: dict[str, dict[str, Any]]) -> Table:
    """A column per arm, a row per figure."""
    shown = Table(title="The needle ladder", title_justify="left")
    shown.add_column("")
    for name in counted:
        shown.add_column(name, justify="right")
    arms = list(counted.values())
    for title, figure in _ROWS:
        shown.add_row(title, *(str(arm[figure]) for arm in arms))
    shown.add_row("prompt tokens cached", *(f"{100 * arm['cached_share']:.1f} %" for arm in arms))
    for tier in TIERS:
        shown.add_row(f"found in {tier}, MiB", *(f"{arm['found_bytes'].get(tier, 0) / 2**20:.1f}" for arm in arms))
    return shown


def differences(arms: list[Arm]) -> list[str]:
    """Descriptions of the answers that differ from the first arm's."""
    baseline = arms[0].texts()
    lines = []
    for arm in arms[1:]:
        for turn, text in arm.texts().items():
            if text != baseline[turn]:
                lines.append(json.dumps({"arm": arm.name, "turn": turn, "off": baseline[turn], "got": text}))
    return lines
