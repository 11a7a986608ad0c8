"""Bit flips, truncations, swapped blocks and worse: a store notices each one, and serves only what was saved.

`make faults` does 100,000 of them, `make test` some 2,000. UPBEAT_FAULTS_SEED repeats a run.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.corruption import House, Seen
from tests.faults.damage import KINDS

SEED = int(os.environ.get("UPBEAT_FAULTS_SEED", random.SystemRandom().randrange(1 << 30)))


async def corrupt(directory: Path, first_port: int, wanted: int) -> Seen:
    """So many damaged objects that were noticed."""
    house, seen, number = House(directory, first_port, SEED), Seen(), 0
    while seen.detected < wanted:
        try:
            await house.batch(random.Random(f"{SEED}/{number}"), seen)
        except BaseException as e:
            e.add_note(f"UPBEAT_FAULTS_SEED={SEED}, batch {number}")
            raise
        number += 1
    return seen


async def test_two_thousand_random_corruptions_are_each_detected(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    seen = await corrupt(tmp_path, free_ports(10), 2000)
    assert seen.untouched
    assert {kind.partition(".")[2] for kind in seen.kinds} == {how.__name__ for how in KINDS}


@pytest.mark.faults
@pytest.mark.timeout(1200)
async def test_a_hundred_thousand_random_corruptions_are_each_detected(
    tmp_path: Path, free_ports: Callable[[int], int], capsys: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    seen = await corrupt(tmp_path, free_ports(10), 100_000)
    with capsys.disabled():
        rate = seen.detected / (time.monotonic() - began)
        print(f"\n{seen.detected} corruptions detected, {seen.harmless} outside all pieces, {rate:.0f}/s, seed {SEED}")
        print(", ".join(f"{kind} {n}" for kind, n in sorted(seen.kinds.items())))
