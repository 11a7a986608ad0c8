"""What verifying costs a request: from asking for a session's chunks until every piece is in the worker's HBM, with and without it."""

from __future__ import annotations

import asyncio
import itertools
import sys
from pathlib import Path

import numpy as np
import uvloop
from ground import GB, SHAPE, SHAPE_8B
from pairs import Figure, Pair, compare
from wire import Stores, Worker

from contracts.ids import SessionKey
from contracts.kv import KvShape

UNVERIFIED = [sys.executable, str(Path(__file__).with_name("unverified_store.py"))]


def measure(scratch: Path, quick: bool) -> list[Pair | Figure]:
    """Two stores at a time, one of which verifies nothing; loads from the SSD, in turns."""
    repetitions = 8 if quick else 160  # single loads differ by half, and a few percent are sought
    found: list[Pair | Figure] = []
    for name, shape, count in (("131 M model", SHAPE, 64), ("8 B model", SHAPE_8B, 8)):
        found.append(uvloop.run(_measure(scratch / f"load-{shape.layers}", name, shape, count, repetitions)))
    return found


async def _measure(scratch: Path, name: str, shape: KvShape, count: int, repetitions: int) -> Pair:
    amount = count * shape.chunk_bytes
    sets = [[np.random.default_rng([9, n, i]).bytes(32) for i in range(count)] for n in range(4)]
    gib = 2.5 * amount / (1 << 30)  # fewer than there are: each set has left the arena before it is asked for again
    with (
        Stores(scratch / "verifying", 1, dram_gib=gib) as verifying,
        Stores(scratch / "trusting", 1, command=UNVERIFIED, dram_gib=gib) as trusting,
    ):
        async with Worker(verifying.address(0), shape, amount) as a, Worker(trusting.address(0), shape, amount) as b:
            for n, keys in enumerate(sets):
                for worker in (a, b):
                    await worker.save(SessionKey("bench", f"load-{n}"), keys, n)
            loop = asyncio.get_running_loop()
            turns = {worker: itertools.cycle(sets) for worker in (a, b)}

            def load(worker: Worker) -> float:
                return asyncio.run_coroutine_threadsafe(worker.load(next(turns[worker])), loop).result()

            def both() -> Pair:
                for worker in (a, b, a, b):
                    load(worker)
                return compare(
                    f"a load from the SSD into HBM with every piece verified, against the same unverified: {name}",
                    lambda: load(a),
                    lambda: load(b),
                    amount / GB,
                    "GB/s",
                    repetitions,
                    0.95,
                    f"{amount >> 20} MiB, from asking until the last piece is copied out of the arena",
                )

            return await asyncio.to_thread(both)
