"""A fleet that is nothing but its reports: two streams a node to the scheduler, as its processes would keep them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

from contracts.v1 import common_pb2, scheduler_pb2

MODEL = "bench"
#: An 8 B model: 32 layers, 8 KV heads of 128, bfloat16.
SHAPE = common_pb2.KvShape(fingerprint=b"f" * 32, layers=32, kv_heads=8, head_dim=128, chunk_tokens=64, dtype="bfloat16")
_TOKEN_BYTES = 32 * 8 * 128 * 2 * 2
#: A store reports its sessions in messages of so many.
_HELD_A_MESSAGE = 1000


class FakeNode:
    """One node. What `took` names is reported as finished with the next report."""

    def __init__(self, name: str, sessions: list[str], seed: int, report_every_s: float) -> None:
        self.name, self._sessions, self._every_s = name, sessions, report_every_s
        self._draw = random.Random(seed)
        self._finished: list[str] = []

    def took(self, request_id: str) -> None:
        """A request was placed here."""
        self._finished.append(request_id)

    async def worker(self) -> AsyncIterator[scheduler_pb2.WorkerReport]:
        """The worker's reports, for ever."""
        model = scheduler_pb2.ModelInfo(name=MODEL, shape=SHAPE, max_tokens=8192)
        yield scheduler_pb2.WorkerReport(hello=scheduler_pb2.WorkerHello(node=self.name, address="x:1", models=[model], instance="1"))
        number = 0
        await asyncio.sleep(self._draw.random() * self._every_s)
        while True:
            number += 1
            finished, self._finished = self._finished, []
            load = scheduler_pb2.WorkerLoad(
                running=8, outstanding_s=self._draw.random() * 5, request_s=2.0, hbm_pages_total=100_000, finished=finished,
                hbm_pages_free=self._draw.randrange(100_000), prefill_token_s=1e-4, number=number,
            )  # fmt: skip
            yield scheduler_pb2.WorkerReport(load=load)
            await asyncio.sleep(self._every_s)

    async def store(self) -> AsyncIterator[scheduler_pb2.StoreReport]:
        """What the store holds, and then nothing more."""
        yield scheduler_pb2.StoreReport(hello=scheduler_pb2.StoreHello(node=self.name, address="x:2", instance="1"))
        for start in range(0, max(len(self._sessions), 1), _HELD_A_MESSAGE):
            held = [self._held(session) for session in self._sessions[start : start + _HELD_A_MESSAGE]]
            yield scheduler_pb2.StoreReport(held=scheduler_pb2.HeldSessions(full=not start, sessions=held))
        await asyncio.Event().wait()

    def _held(self, session: str) -> scheduler_pb2.Held:
        tokens = 64 * self._draw.randrange(1, 100)
        return scheduler_pb2.Held(
            session=common_pb2.Session(tenant="t", session_id=session), model=MODEL, tokens_total=tokens, tokens_here=tokens,
            bytes_here=tokens * _TOKEN_BYTES, tokens_dram=tokens, last_use_s=1.0,
        )  # fmt: skip


class FakeFleet:
    """`count` nodes that share `sessions`; `run` keeps their streams up until it is cancelled."""

    def __init__(self, count: int, sessions: int, report_every_s: float) -> None:
        names = [f"s{i}" for i in range(sessions)]
        self.nodes = {f"node-{i}": FakeNode(f"node-{i}", names[i::count], i, report_every_s) for i in range(count)}

    async def run(self, stub: Any) -> None:
        """Report, and read whatever commands come."""
        await asyncio.gather(*(_drain(stub.WorkerReports(n.worker())) for n in self.nodes.values()),
                             *(_drain(stub.StoreReports(n.store())) for n in self.nodes.values()))  # fmt: skip


async def _drain(call: Any) -> None:
    async for _ in call:
        pass
