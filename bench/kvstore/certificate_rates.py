"""What certificates cost: loads between two stores of one machine, and bulk reads over TLS."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import uvloop
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from ground import GB, SHAPE, SHAPE_8B, arena
from pairs import Figure, Pair, compare
from wire import Stores, Worker

from cli.authority import Authority, everybody
from contracts.ids import SessionKey
from contracts.kv import KvShape
from kvstore.tiers.arena import Arena
from kvstore.tiers.transport import Card, LeasedRanges, PeerRange
from kvstore.tiers.transport_socket import SocketTransport
from loadtest.stack import free_ports
from storelink import credentials

#: Bytes of one read over TCP, and what TLS encrypts at a time.
_READ_BYTES, _RECORD_BYTES = 8 << 20, 16 << 10


def measure(scratch: Path, quick: bool) -> list[Pair | Figure]:
    """Loads of both shapes over the Unix socket; then TCP with and without TLS."""
    found: list[Pair | Figure] = []
    for name, shape, count in (("131 M model", SHAPE, 64), ("8 B model", SHAPE_8B, 8)):
        where = scratch / shape.fingerprint[:4].decode()
        found += uvloop.run(_of_stores(where, name, shape, count, 9 if quick else 41))
    found.append(asyncio.run(_over_tcp(scratch / "tcp", 9 if quick else 41)))
    found.append(_of_library(0.3 if quick else 2.0))
    return found


async def _of_stores(scratch: Path, name: str, shape: KvShape, count: int, repetitions: int) -> list[Pair]:
    """Two fleets beside each other, with certificates and without, in turns."""
    loop, amount = asyncio.get_running_loop(), count * shape.chunk_bytes
    gib = amount / (1 << 30)
    # The owner's arena holds all sets, the reader's fewer, so that each set is evicted before it is read again.
    reader = {1: {"UPBEAT__KV__WRITE_BACK_LIMIT_BYTES": str(1 << 20), "UPBEAT__KV__DRAM_GIB": str(2.5 * gib)}}
    sets = [[np.random.default_rng([17, n, i]).bytes(32) for i in range(count)] for n in range(5)]
    from_peer, from_dram = [], []
    async with AsyncExitStack() as running:
        for certified in (True, False):
            folder = scratch / ("with" if certified else "without")
            stores = running.enter_context(
                Stores(folder, 2, reader, certified=certified, dram_gib=6.5 * gib, transport="socket")
            )
            workers = [await running.enter_async_context(_worker(stores, node, shape)) for node in (0, 1)]
            for n, keys in enumerate(sets):
                await workers[0].save(SessionKey("bench", f"certified-{n}"), keys, n)
            from_peer.append(_loads(loop, workers[1], sets, ["node-0"]))
            from_dram.append(_loads(loop, workers[0], sets, []))
        return [
            await asyncio.to_thread(
                compare, f"a session in {what}, with certificates against without: {name}", *both, amount / GB, "GB/s",
                repetitions, 0.95, "from a worker's question to its last piece in the arena",
            )
            for what, both in (("a peer's DRAM of the same machine", from_peer), ("the node's own DRAM", from_dram))
        ]  # fmt: skip


def _worker(stores: Stores, node: int, shape: KvShape) -> Worker:
    return Worker(stores.address(node), shape, 0, stores.certificate(node))


def _loads(
    loop: asyncio.AbstractEventLoop, worker: Worker, sets: list[list[bytes]], sources: list[str]
) -> Callable[[], float]:
    of_turn = itertools.cycle(sets)
    return lambda: asyncio.run_coroutine_threadsafe(worker.load(next(of_turn), sources, copy=False), loop).result()


async def _over_tcp(scratch: Path, repetitions: int) -> Pair:
    """The transport alone, as between machines: one read of 8 MiB after the other, both ends in this process."""
    amount, ranges = 128 << 20, [(at, at, 64 << 10) for at in range(0, _READ_BYTES, 64 << 10)]
    with arena(_READ_BYTES, "owner") as there, arena(_READ_BYTES, "reader") as here:
        ways = []
        try:
            for certified in (True, False):
                credentials.use(_certificates(scratch) / "node-0" if certified else None)
                ways.append(await _Tcp.open(there, here, ranges))
        finally:
            credentials.use(None)
        loop = asyncio.get_running_loop()
        secured, plain = (
            lambda way=way: asyncio.run_coroutine_threadsafe(way.read(amount), loop).result() for way in ways
        )  # type: ignore[misc]
        pair = await asyncio.to_thread(
            compare, "reads between machines: TLS against plain TCP", secured, plain, amount / GB, "GB/s", repetitions,
            note=f"reads of {_READ_BYTES >> 20} MiB in pieces of 64 KiB over loopback, one at a time",
        )  # fmt: skip
        for way in ways:
            await way.close()
    return pair


class _Tcp:
    """An owner and a reader."""

    def __init__(self, owner: SocketTransport, reader: SocketTransport, card: Card, ranges: list[PeerRange]) -> None:
        self._owner, self._reader, self._card, self._ranges = owner, reader, card, ranges

    @classmethod
    async def open(cls, there: Arena, here: Arena, ranges: list[PeerRange]) -> _Tcp:
        """With the certificate that this process uses now."""
        leases, first = LeasedRanges(), free_ports(2)
        owner, reader = (
            SocketTransport(memory, leases, address, address)
            for memory, address in ((there, f"127.0.0.1:{first}"), (here, f"127.0.0.1:{first + 1}"))
        )
        await owner.start()
        card = owner.fill(Card("node-0", f"{first}", b"", there.address, there.size_bytes, ""))
        leases.open("lease", "node-0")
        leases.add("lease", [(offset, length) for offset, _, length in ranges])
        return cls(owner, reader, card._replace(local_name=""), ranges)

    async def read(self, amount: int) -> float:
        """Seconds for so many bytes."""
        begun = time.perf_counter()
        for _ in range(amount // _READ_BYTES):
            if not await self._reader.read(self._card, "lease", self._ranges):
                raise RuntimeError("a read over TCP failed")
        return time.perf_counter() - begun

    async def close(self) -> None:
        """End both."""
        await self._reader.stop()
        await self._owner.stop()


def _certificates(directory: Path) -> Path:
    authority = Authority(directory)
    for who in everybody(1):
        authority.issue(who, 1)
    return directory


def _of_library(least_s: float) -> Figure:
    """What one core encrypts: TLS does it at one end and undoes it at the other."""
    aead, nonce = AESGCM(os.urandom(32)), bytes(12)
    record, into = os.urandom(_RECORD_BYTES), bytearray(_RECORD_BYTES + 16)
    count, begun = 0, time.perf_counter()
    while (took := time.perf_counter() - begun) < least_s:
        for _ in range(100):
            aead.encrypt_into(nonce, record, b"", into)
        count += 100
    return Figure(
        "AES-256-GCM of the library, one core", round(count * _RECORD_BYTES / took / GB, 3), "GB/s",
        note="records of 16 KiB, as TLS has them; this kernel has no kTLS" if not _has_ktls() else "records of 16 KiB",
    )  # fmt: skip


def _has_ktls() -> bool:
    try:
        return "tls" in Path("/proc/sys/net/ipv4/tcp_available_ulp").read_text().split()
    except OSError:
        return False
