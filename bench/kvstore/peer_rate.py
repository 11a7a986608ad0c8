"""A peer's DRAM to this node's arena: lease and transport between two store processes, beside a bare UCX READ between two processes."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from ground import GB, SHAPE, SHAPE_8B, arena, bare_agent
from pairs import Figure, Pair, compare
from wire import Stores, Worker

from contracts.ids import SessionKey
from contracts.kv import KvShape
from kvstore.core.events import SourceKind
from kvstore.core.fetches import RUNNING_LIMIT
from kvstore.tiers.arena import Arena

#: As the store reads under a lease (kvstore/core/leases.py).
READ_BYTES = 8 << 20
DEPTH = RUNNING_LIMIT[SourceKind.PEER]


def measure(scratch: Path, quick: bool) -> list[Pair | Figure]:
    """Two shapes; every repetition reads chunks that the reader does not have, into slots that others had before."""
    repetitions = 5 if quick else 12
    found: list[Pair | Figure] = []
    for name, shape, count in (("8 B model", SHAPE_8B, 16), ("131 M model", SHAPE, 128)):
        found += uvloop.run(_measure(scratch / shape.fingerprint[:4].decode(), name, shape, count, repetitions))
    return found


async def _measure(scratch: Path, name: str, shape: KvShape, count: int, repetitions: int) -> list[Pair | Figure]:
    amount = count * shape.chunk_bytes
    # As many sets as the owner's arena holds, in turns; the reader's holds fewer, so that each has left before it comes again.
    sets = [[np.random.default_rng([7, n, i]).bytes(32) for i in range(count)] for n in range(5)]
    gib = amount / (1 << 30)
    # The reader keeps hardly anything of what it read on its SSD: that is not what is measured.
    reads_only = {1: {"UPBEAT__KV__WRITE_BACK_LIMIT_BYTES": str(1 << 20), "UPBEAT__KV__DRAM_GIB": str(2.5 * gib)}}
    with Stores(scratch, 2, reads_only, dram_gib=6.5 * gib) as stores:
        async with Worker(stores.address(0), shape, 0) as owner, Worker(stores.address(1), shape, 0) as reader:
            for n, keys in enumerate(sets):
                await owner.save(SessionKey("bench", f"peer-{n}"), keys, n)
            loop = asyncio.get_running_loop()
            unread = itertools.cycle(sets)

            def ours() -> float:
                return asyncio.run_coroutine_threadsafe(reader.load(next(unread), ["node-0"], copy=False), loop).result()

            def warm() -> None:
                for _ in range(4):
                    ours()

            with arena(amount, "bare") as memory, BarePeer(memory, shape) as bare:
                await asyncio.to_thread(warm)
                pair = await asyncio.to_thread(
                    compare,
                    f"peer's DRAM to arena, leased and verified, against a bare NIXL UCX READ: {name}",
                    ours,
                    bare.read,
                    amount / GB,
                    "GB/s",
                    repetitions,
                    0.85,
                    f"{amount >> 20} MiB in pieces of {shape.piece_bytes >> 10} KiB; ours includes asking, leasing, telling the worker",
                )
    return [pair]


class BarePeer:
    """Reads another process's arena of the same size with a bare agent."""

    def __init__(self, memory: Arena, shape: KvShape) -> None:
        self._memory = memory
        self._piece_bytes = shape.piece_bytes
        command = [sys.executable, str(Path(__file__).with_name("bare_peer.py")), str(memory.size_bytes)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        card = json.loads(self._process.stdout.readline())
        self._base = card["base"]
        self._agent = bare_agent("bare-reader", "UCX", memory)
        self._peer = self._agent.add_remote_agent(base64.b64decode(card["metadata"]))

    def __enter__(self) -> BarePeer:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def read(self) -> float:
        agent, size, per_read = self._agent, self._piece_bytes, READ_BYTES // self._piece_bytes
        starts = list(range(0, self._memory.size_bytes, size))
        begun = time.perf_counter()
        running: list[Any] = []
        for first in range(0, len(starts), per_read):
            part = starts[first : first + per_read]
            local = agent.get_xfer_descs([(self._memory.address + o, size, 0) for o in part], "DRAM")
            remote = agent.get_xfer_descs([(self._base + o, size, 0) for o in part], "DRAM")
            handle = agent.initialize_xfer("READ", local, remote, self._peer, backends=["UCX"])
            if agent.transfer(handle) == "ERR":
                raise OSError("bare NIXL failed")
            running.append(handle)
            while len(running) >= DEPTH:
                running = [h for h in running if not self._ended(h)]
        while running:
            running = [h for h in running if not self._ended(h)]
        return time.perf_counter() - begun

    def _ended(self, handle: Any) -> bool:
        state = self._agent.check_xfer_state(handle)
        if state == "ERR":
            raise OSError("bare NIXL failed")
        if state == "DONE":
            handle.release()
        return bool(state == "DONE")
