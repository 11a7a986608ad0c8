"""What verification costs a request: loads with and without it, from the request until every piece is in HBM."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import numpy as np
import uvloop
from ground import GB, SHAPE, SHAPE_8B
from pairs import Figure, Pair, compare
from switched_store import FILE, Switch
from wire import Stores, Worker

from contracts.ids import SessionKey
from contracts.kv import KvShape

STORE = [sys.executable, str(Path(__file__).with_name("switched_store.py"))]


def measure(scratch: Path, quick: bool) -> list[Pair | Figure]:
    """Loads from one store's SSD, alternating with and without verification."""
    repetitions = 8 if quick else 120  # single loads vary by half, and the effect is a few percent
    found: list[Pair | Figure] = []
    for name, shape, count in (("131 M model", SHAPE, 64), ("8 B model", SHAPE_8B, 8)):
        found.append(uvloop.run(_measure(scratch / f"load-{shape.layers}", name, shape, count, repetitions)))
    return found


async def _measure(scratch: Path, name: str, shape: KvShape, count: int, repetitions: int) -> Pair:
    amount = count * shape.chunk_bytes
    sets = [[np.random.default_rng([9, n, i]).bytes(32) for i in range(count)] for n in range(4)]
    gib = 2.5 * amount / (1 << 30)  # less than all sets need: each is evicted before it is loaded again
    switch = Switch(scratch / "switch")
    with Stores(scratch / "store", 1, {0: {FILE: str(scratch / "switch")}}, command=STORE, dram_gib=gib) as stores:
        async with Worker(stores.address(0), shape, amount) as worker:
            for n, keys in enumerate(sets):
                await worker.save(SessionKey("bench", f"load-{n}"), keys, n)
            loop = asyncio.get_running_loop()

            async def loaded(trusts: bool) -> float:
                """Seconds to load every set, one after the other."""
                switch.trusts = trusts
                return sum([await worker.load(keys) for keys in sets])

            def load(trusts: bool) -> float:
                return asyncio.run_coroutine_threadsafe(loaded(trusts), loop).result()

            def both() -> Pair:
                for trusts in (False, True, False, True):
                    load(trusts)
                return compare(
                    f"a load from the SSD into HBM with every piece verified, against the same unverified: {name}",
                    lambda: load(False),
                    lambda: load(True),
                    len(sets) * amount / GB,
                    "GB/s",
                    repetitions,
                    0.95,
                    f"{len(sets)} loads of {amount >> 20} MiB, from asking until the last piece is copied out of "
                    "the arena",
                )

            return await asyncio.to_thread(both)
