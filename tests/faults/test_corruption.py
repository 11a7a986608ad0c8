"""Bit flips, truncations, swapped blocks and worse: a store notices each one, and serves only what was saved.

`make faults` does 100,000 of them, `make test-long` some 2,000. UPBEAT_FAULTS_SEED repeats a run.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import reduce
from operator import add
from pathlib import Path

import pytest

from tests.faults.corruption import corrupt, corrupt_in_process
from tests.faults.damage import KINDS
from tests.kvstore.forgeries import flip_bits, subjects

SEED = int(os.environ.get("UPBEAT_FAULTS_SEED", random.SystemRandom().randrange(1 << 30)))
#: Each of these does its part of the 100,000.
PROCESSES = 2
WANTED = 100_000


@pytest.mark.parametrize("encrypt", [False, True], ids=["plain", "encrypted"])
async def test_two_thousand_random_corruptions_are_each_detected(
    tmp_path: Path, free_ports: Callable[[int], int], encrypt: bool
) -> None:
    seen = await corrupt(tmp_path, free_ports(10), SEED, 1000, encrypt=encrypt)
    assert seen.untouched
    assert {kind.partition(".")[2] for kind in seen.kinds} == {how.__name__ for how in KINDS}


@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_a_million_flipped_bits_of_objects_and_records_change_nothing_that_is_read(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        parts = list(pool.map(flip_bits, [1_000_000 // PROCESSES] * PROCESSES, range(SEED, SEED + PROCESSES)))
    noticed = {name: sum(part[name] for part in parts) for name in parts[0]}
    assert len(noticed) == len(subjects())
    with capsys.disabled():
        print(f"\nflips noticed of 1,000,000: {noticed}, seed {SEED}", end="")


@pytest.mark.faults
@pytest.mark.timeout(1800)
async def test_a_hundred_thousand_random_corruptions_are_each_detected(
    free_ports: Callable[[int], int], capsys: pytest.CaptureFixture[str]
) -> None:
    began, loop = time.monotonic(), asyncio.get_running_loop()
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with (
        tempfile.TemporaryDirectory(prefix="upbeat-corruption-", dir=memory) as root,
        ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool,
    ):
        places = [Path(root) / str(i) for i in range(PROCESSES)]
        parts = [
            loop.run_in_executor(
                pool, corrupt_in_process, place, free_ports(10), SEED + i, WANTED // PROCESSES, bool(i % 2)
            )
            for i, place in enumerate(places)
        ]
        seen = reduce(add, await asyncio.gather(*parts))
    with capsys.disabled():
        seconds = time.monotonic() - began
        print(
            f"\n{seen.detected} corruptions detected, {seen.harmless} outside all pieces, in {seconds:.0f} s, seed "
            f"{SEED}"
        )
        print(", ".join(f"{kind} {n}" for kind, n in sorted(seen.kinds.items())), end="")
