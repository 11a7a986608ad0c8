"""A peer's DRAM to this node's arena, against a bare UCX READ between two processes.

Measures the leased reads alone, and a whole load between two stores, from a worker's request to its last piece.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from ground import GB, SHAPE, SHAPE_8B, arena, bare_agent
from pairs import Figure, Pair, compare
from wire import Stores, Worker

from contracts.ids import SessionKey
from contracts.kv import KvShape
from kvstore.core.events import Event, Fault, PeerEnded, PeerReady, SourceKind
from kvstore.core.fetches import RUNNING_LIMIT
from kvstore.core.instructions import AskPeer, Fetch, FetchPiece, ReleasePeer
from kvstore.peers import Peers
from kvstore.tiers.arena import Arena
from kvstore.tiers.transport import Card, LeasedRanges
from kvstore.tiers.transport_nixl import NixlTransport
from runtime.clock import RealClock
from runtime.service import Tasks

#: Size of the store's leased reads (kvstore/core/leases.py).
READ_BYTES = 8 << 20
DEPTH = RUNNING_LIMIT[SourceKind.PEER]


def measure(scratch: Path, quick: bool) -> list[Pair | Figure]:
    """Two shapes. Every repetition reads chunks that the reader lacks, into slots that other chunks used before."""
    repetitions = 5 if quick else 40
    found: list[Pair | Figure] = []
    for name, shape, count in (("8 B model", SHAPE_8B, 32), ("131 M model", SHAPE, 256)):
        found += uvloop.run(_measure(scratch / shape.fingerprint[:4].decode(), name, shape, count, repetitions))
    return found


async def _measure(scratch: Path, name: str, shape: KvShape, count: int, repetitions: int) -> list[Pair | Figure]:
    amount = count * shape.chunk_bytes
    # The owner's arena holds all sets, the reader's fewer, so that each set is evicted before it is read again.
    sets = [[np.random.default_rng([7, n, i]).bytes(32) for i in range(count)] for n in range(5)]
    gib = amount / (1 << 30)
    # The reader hardly writes back: that is not measured here.
    reads_only = {1: {"UPBEAT__KV__WRITE_BACK_LIMIT_BYTES": str(1 << 20), "UPBEAT__KV__DRAM_GIB": str(2.5 * gib)}}
    with Stores(scratch, 2, reads_only, dram_gib=6.5 * gib) as stores:
        async with Worker(stores.address(0), shape, 0) as owner, Worker(stores.address(1), shape, 0) as reader:
            for n, keys in enumerate(sets):
                await owner.save(SessionKey("bench", f"peer-{n}"), keys, n)
            loop = asyncio.get_running_loop()
            unread = itertools.cycle(sets)

            def ours() -> float:
                return asyncio.run_coroutine_threadsafe(
                    reader.load(next(unread), ["node-0"], copy=False), loop
                ).result()

            def warm() -> None:
                for _ in range(4):
                    ours()

            with arena(amount, "bare") as memory, BarePeer(memory, shape) as bare, arena(amount, "leased") as own:
                reads = await LeasedReads.open(own, shape, stores.address(0), sets[-1])
                reading = await asyncio.to_thread(
                    compare,
                    f"peer's DRAM to arena, under a lease and verified, against a bare NIXL UCX READ: {name}",
                    lambda: asyncio.run_coroutine_threadsafe(reads.read(), loop).result(),
                    bare.read,
                    amount / GB,
                    "GB/s",
                    repetitions,
                    0.85,
                    f"{amount >> 20} MiB in pieces of {shape.piece_bytes >> 10} KiB, {DEPTH} reads of "
                    f"{READ_BYTES >> 20} MiB at a time",
                )
                await reads.close()
                await asyncio.to_thread(warm)
                asking = await asyncio.to_thread(
                    compare,
                    "a session in a peer's DRAM, from a worker's question to its last piece, against the bare "
                    f"READ: {name}",
                    ours,
                    bare.read,
                    amount / GB,
                    "GB/s",
                    repetitions,
                    note="includes asking, leasing, making room and notifying the worker; small, so all of that counts",
                )
    return [reading, asking]


class LeasedReads:
    """Reads a store's arena from this process with the store's code: a lease, `Peers.read`, verification."""

    def __init__(self, own: Arena, shape: KvShape, count: int) -> None:
        self._own, self._shape, self._count = own, shape, count
        self._ready: list[tuple[int, int, int, int]] = []
        self._ended = asyncio.Event()
        self._tasks = Tasks()

    @classmethod
    async def open(cls, own: Arena, shape: KvShape, address: str, keys: Sequence[bytes]) -> LeasedReads:
        """Lease every piece of `keys`, lowest layers first; each has a place in `own`."""
        made = cls(own, shape, len(keys))
        made._transport = NixlTransport(own, LeasedRanges(), f"bench-{os.getpid()}-{own.address}")
        await made._transport.start()
        card = made._transport.fill(Card("bench", uuid.uuid4().hex, b"", own.address, own.size_bytes, ""))
        made._peers = Peers({"node-0": address}, card, own, made._transport, RealClock(), made._report, made._tasks)
        wants = tuple((key, tuple(range(shape.layers))) for key in keys)
        made._peers.ask(AskPeer("lease", "node-0", shape.fingerprint, wants), shape.layers)
        await asyncio.wait_for(made._ended.wait(), 30)
        if len(made._ready) != len(keys) * shape.layers:
            raise RuntimeError(f"{len(made._ready)} pieces of {len(keys) * shape.layers} were leased")
        return made

    def _report(self, event: Event) -> None:
        if isinstance(event, PeerReady):
            self._ready += event.pieces
        elif isinstance(event, PeerEnded):
            self._ended.set()

    async def read(self) -> float:
        """Seconds until every piece is in the arena and verified."""
        size = self._shape.piece_bytes
        pieces = [
            FetchPiece(b"", layer, i * size, offset, checksum)
            for i, (_, layer, offset, checksum) in enumerate(self._ready)
        ]
        per_read = READ_BYTES // size
        gate = asyncio.Semaphore(DEPTH)

        async def one(number: int, part: tuple[FetchPiece, ...]) -> dict[int, Fault]:
            async with gate:
                return await self._peers.read(
                    Fetch(number, SourceKind.PEER, self._shape, part, "lease", "node-0", 60.0)
                )

        begun = time.perf_counter()
        faults = await asyncio.gather(
            *(one(i, tuple(pieces[i : i + per_read])) for i in range(0, len(pieces), per_read))
        )
        seconds = time.perf_counter() - begun
        if any(faults):
            raise RuntimeError(f"reads under a lease failed: {faults}")
        return seconds

    async def close(self) -> None:
        """Release the lease and end."""
        self._peers.release(ReleasePeer("lease", "node-0"))
        await asyncio.sleep(0.2)
        await self._peers.stop()
        await self._transport.stop()


class BarePeer:
    """Reads an equally large arena of another process with a bare agent."""

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
