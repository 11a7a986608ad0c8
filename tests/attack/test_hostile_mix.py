"""Ten minutes of every attack that once hurt somebody, fifty a second, beside eight honest conversations: what these
are answered, and when, is as on a quiet stack, and no process ends."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from loadtest.stack import Stack
from tests.attack.hostile import ATTACKS
from tests.attack.world import KEYS, MODEL, SETTINGS, Honest, going_first, quantile, started

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.timeout(1500)]
ROOT = Path(__file__).parents[2]
USERS, PAUSE_S, RATE = 8, 0.4, 50.0
QUIET_S, HOSTILE_S = 60.0, float(os.environ.get("UPBEAT_HOSTILE_S", "600"))
#: How many times as long as on a quiet stack the slowest hundredth of first tokens may take.
SLOWER = 2.0


@dataclass
class Seen:
    """What came of it. told: by attack, how often which status came back. before, after: every process of the stack."""

    wrong: list[str]
    told: dict[str, dict[str, int]]
    before: dict[str, tuple[int, float]]
    after: dict[str, tuple[int, float]]
    quiet_s: list[float]
    attacked_s: list[float]


async def attacked(stack: Stack, number: int) -> Seen:
    honest = Honest(stack.url, USERS, PAUSE_S)
    await honest.alone()
    end = time.monotonic() + QUIET_S
    await honest.until(lambda: time.monotonic() > end)
    quiet, honest.ttft_s = honest.ttft_s, []
    before = started(stack)
    # In a session of its own, so that it can step aside as a session.
    program = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.attack.hostile", stack.url, KEYS["hostile"], str(HOSTILE_S), str(RATE),
        str(number),
        stdout=asyncio.subprocess.PIPE, cwd=ROOT, start_new_session=True,
    )  # fmt: skip
    attacking = asyncio.ensure_future(program.communicate())
    try:
        await honest.until(attacking.done)
        told: dict[str, dict[str, int]] = json.loads((await attacking)[0])
    finally:
        if program.returncode is None:
            program.kill()
    return Seen(honest.wrong, told, before, started(stack), quiet, honest.ttft_s)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    number = int(os.environ.get("UPBEAT_FAULTS_SEED", random.SystemRandom().randrange(1 << 30)))
    directory = tmp_path_factory.mktemp("stack")
    with (
        Stack(model=MODEL, nodes=2, directory=directory, hbm_gib=0.25, dram_gib=0.25, settings=SETTINGS) as stack,
        going_first(),
    ):
        found = asyncio.run(attacked(stack, number))
    for name, statuses in found.told.items():
        print(f"{name}: {statuses}")
    for name, times in (("quiet", found.quiet_s), ("attacked", found.attacked_s)):
        print(f"{name}: TTFT p50 {quantile(times, 0.5):.3f} s, p99 {quantile(times, 0.99):.3f} s of {len(times)} turns")
    print(f"UPBEAT_FAULTS_SEED={number}")
    return found


def test_eight_users_are_answered_as_on_a_quiet_stack_and_no_process_ends(seen: Seen) -> None:
    assert seen.wrong == []
    assert seen.after == seen.before
    assert {status for statuses in seen.told.values() for status in statuses if status.startswith("5")} <= {"503"}
    assert set(seen.told) == set(ATTACKS)
    assert sum(sum(statuses.values()) for statuses in seen.told.values()) > 0.8 * RATE * HOSTILE_S


def test_their_slowest_first_tokens_take_at_most_twice_as_long(seen: Seen) -> None:
    assert quantile(seen.attacked_s, 0.99) <= SLOWER * quantile(seen.quiet_s, 0.99)
