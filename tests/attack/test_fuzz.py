"""Whatever a tenant sends to a real stack, on any route and in any field: it gets an answer that is documented, no
process ends, and what the others are answered beside it is what they are answered alone."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.stack import Stack
from tests.attack.cases import KINDS, OPERATIONS, TARGETS
from tests.attack.world import KEYS, MODEL, SETTINGS, Honest, started

ROOT = Path(__file__).parents[2]
QUICK_CASES, LONG_CASES = 2_000, 100_000


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(
        model=MODEL, nodes=2, directory=tmp_path_factory.mktemp("stack"), hbm_gib=0.25, dram_gib=0.25, settings=SETTINGS
    ) as made:
        yield made


async def attacked(stack: Stack, cases: int, attackers: int, users: int, limit_s: float) -> None:
    number = int(os.environ.get("UPBEAT_FAULTS_SEED", random.SystemRandom().randrange(1 << 30)))
    print(f"UPBEAT_FAULTS_SEED={number}")
    honest = Honest(stack.url, users)
    await honest.alone()
    before = started(stack)
    each = -(-cases * 21 // 20 // attackers)  # of some kinds there are not as many cases as are asked for
    programs = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.attack.attacker", stack.url, KEYS["hostile"], str(each), str(number + i),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL, cwd=ROOT,
        )
        for i in range(attackers)
    ]  # fmt: skip
    attacks = asyncio.gather(*(program.communicate() for program in programs))
    try:
        async with asyncio.timeout(limit_s):
            held = await honest.until(attacks.done)
            told = [json.loads(output) for output, _ in await attacks]
    finally:
        for program in programs:
            if program.returncode is None:
                program.kill()
    statuses = {
        status: sum(t["statuses"].get(status, 0) for t in told)
        for status in sorted({s for t in told for s in t["statuses"]})
    }
    print(f"{sum(t['cases'] for t in told)} cases: {statuses}; {held} honest conversations beside them")
    failures = [failure for t in told for failure in t["failures"]]
    assert not failures, "\n" + "\n".join(failures)
    assert started(stack) == before, "a process ended"
    assert honest.wrong == []
    assert sum(t["cases"] for t in told) >= cases
    assert statuses["200"] > cases // 10 and statuses["400"] > cases // 10, (
        "both what is right and what is wrong was tried"
    )


def test_every_route_that_takes_a_body_is_attacked_field_by_field() -> None:
    attacked = {f"{target.method} {target.path}" for target in TARGETS.values()}
    attacked |= {"POST /v1/files"} if "forms" in KINDS else set()
    described = {label for label in OPERATIONS if OPERATIONS[label].body}
    assert {label.replace("{name}", "hostile") for label in described} <= attacked


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.stack
@pytest.mark.timeout(280)
async def test_two_thousand_hostile_requests_hurt_nobody_else(stack: Stack) -> None:
    await attacked(stack, QUICK_CASES, attackers=2, users=1, limit_s=240)


@pytest.mark.stack
@pytest.mark.faults
@pytest.mark.timeout(5400)
async def test_a_hundred_thousand_hostile_requests_hurt_nobody_else(stack: Stack) -> None:
    await attacked(stack, LONG_CASES, attackers=4, users=2, limit_s=5000)
