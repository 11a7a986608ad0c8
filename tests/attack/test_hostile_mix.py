"""Ten minutes of every attack that once hurt somebody, fifty a second, beside eight honest conversations: what these are
answered, and when, is as on a quiet stack, and no process ends."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from pathlib import Path

import pytest

from loadtest.stack import Stack
from tests.attack.hostile import ATTACKS
from tests.attack.world import KEYS, MODEL, SETTINGS, Honest, quantile, started

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.timeout(1500)]
ROOT = Path(__file__).parents[2]
PEOPLE, RATE = 8, 50.0
QUIET_S, HOSTILE_S = 60.0, float(os.environ.get("UPBEAT_HOSTILE_S", "600"))
#: How many times as long as on a quiet stack the slowest hundredth of first tokens may take.
SLOWER = 2.0


async def test_eight_people_are_served_as_on_a_quiet_stack(tmp_path: Path) -> None:
    number = int(os.environ.get("UPBEAT_FAULTS_SEED", random.SystemRandom().randrange(1 << 30)))
    with Stack(model=MODEL, nodes=2, directory=tmp_path, hbm_gib=0.25, dram_gib=0.25, settings=SETTINGS) as stack:
        honest = Honest(stack.url, PEOPLE)
        await honest.alone()
        end = time.monotonic() + QUIET_S
        await honest.until(lambda: time.monotonic() > end)
        quiet, honest.ttft_s = honest.ttft_s, []
        before = started(stack)
        program = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.attack.hostile", stack.url, KEYS["hostile"], str(HOSTILE_S), str(RATE), str(number),
            stdout=asyncio.subprocess.PIPE, cwd=ROOT,
        )  # fmt: skip
        attacking = asyncio.ensure_future(program.communicate())
        try:
            held = await honest.until(attacking.done)
            told: dict[str, dict[str, int]] = json.loads((await attacking)[0])
        finally:
            if program.returncode is None:
                program.kill()
        for name, statuses in told.items():
            print(f"{name}: {statuses}")
        p99 = {"quiet": quantile(quiet, 0.99), "attacked": quantile(honest.ttft_s, 0.99)}
        p50 = {"quiet": quantile(quiet, 0.5), "attacked": quantile(honest.ttft_s, 0.5)}
        print(f"UPBEAT_FAULTS_SEED={number}; {held} honest conversations; TTFT p50 {p50}, p99 {p99} s of {len(honest.ttft_s)} turns")
        assert honest.wrong == []
        assert started(stack) == before, "a process ended"
        assert {status for statuses in told.values() for status in statuses if status.startswith("5")} <= {"503"}
        assert set(told) == set(ATTACKS) and sum(sum(statuses.values()) for statuses in told.values()) > 0.8 * RATE * HOSTILE_S
        assert p99["attacked"] <= SLOWER * p99["quiet"]
