"""A fake fleet that only reports: two streams per node to the scheduler, like a worker's and a store's.

`Reporting` runs it in a separate process, so that callers do not wait for a thousand nodes' reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

from contracts.identity import SCHEDULER
from contracts.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from runtime import rpc

MODEL = "bench"
#: The shape of an 8B model: 32 layers, 8 KV heads of 128, bfloat16.
SHAPE = common_pb2.KvShape(
    fingerprint=b"f" * 32, layers=32, kv_heads=8, head_dim=128, chunk_tokens=64, dtype="bfloat16"
)
_TOKEN_BYTES = 32 * 8 * 128 * 2 * 2
#: Sessions per message of a store.
_HELD_A_MESSAGE = 1000
#: The fleet's niceness relative to callers; seconds between messages about placed requests.
_NICE, _TELL_S = 5, 0.05


class FakeNode:
    """A node. Requests passed to `took` are finished in its next report."""

    def __init__(self, name: str, sessions: list[str], seed: int, report_every_s: float) -> None:
        self.name, self._sessions, self._every_s = name, sessions, report_every_s
        self._draw = random.Random(seed)
        self._finished: list[str] = []

    def took(self, request_id: str) -> None:
        """Note a request placed on this node."""
        self._finished.append(request_id)

    async def worker(self) -> AsyncIterator[scheduler_pb2.WorkerReport]:
        """Yield the worker's reports without end."""
        model = scheduler_pb2.ModelInfo(name=MODEL, shape=SHAPE, max_tokens=8192)
        yield scheduler_pb2.WorkerReport(
            hello=scheduler_pb2.WorkerHello(node=self.name, address="x:1", models=[model], instance="1")
        )
        clock = asyncio.get_running_loop().time
        number, due_s = 0, clock() + self._draw.random() * self._every_s
        while True:
            # At fixed times, not after the last report: otherwise one common delay would align all nodes forever.
            await asyncio.sleep(due_s - clock())
            number, due_s = number + 1, due_s + self._every_s
            finished, self._finished = self._finished, []
            load = scheduler_pb2.WorkerLoad(
                running=8, outstanding_s=self._draw.random() * 5, request_s=2.0, hbm_pages_total=100_000,
                finished=finished,
                hbm_pages_free=self._draw.randrange(100_000), prefill_token_s=1e-4, number=number,
            )  # fmt: skip
            yield scheduler_pb2.WorkerReport(load=load)

    async def store(self) -> AsyncIterator[scheduler_pb2.StoreReport]:
        """Yield the store's sessions, then stay silent."""
        yield scheduler_pb2.StoreReport(hello=scheduler_pb2.StoreHello(node=self.name, address="x:2", instance="1"))
        for start in range(0, max(len(self._sessions), 1), _HELD_A_MESSAGE):
            held = [self._held(session) for session in self._sessions[start : start + _HELD_A_MESSAGE]]
            yield scheduler_pb2.StoreReport(held=scheduler_pb2.HeldSessions(full=not start, sessions=held))
        await asyncio.Event().wait()

    def _held(self, session: str) -> scheduler_pb2.Held:
        tokens = 64 * self._draw.randrange(1, 100)
        return scheduler_pb2.Held(
            session=common_pb2.Session(tenant="t", session_id=session), model=MODEL, tokens_total=tokens,
            tokens_here=tokens,
            bytes_here=tokens * _TOKEN_BYTES, tokens_dram=tokens, last_use_s=1.0,
        )  # fmt: skip


class FakeFleet:
    """`count` nodes that share `sessions`. `run` keeps their streams open until cancelled."""

    def __init__(self, count: int, sessions: int, report_every_s: float) -> None:
        names = [f"s{i}" for i in range(sessions)]
        self.nodes = {f"node-{i}": FakeNode(f"node-{i}", names[i::count], i, report_every_s) for i in range(count)}

    async def run(self, stub: Any) -> None:
        """Report and read commands."""
        await asyncio.gather(*(_drain(stub.WorkerReports(n.worker())) for n in self.nodes.values()),
                             *(_drain(stub.StoreReports(n.store())) for n in self.nodes.values()))  # fmt: skip


async def _drain(call: Any) -> None:
    async for _ in call:
        pass


class Reporting:
    """A `FakeFleet` in another process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._took: list[str] = []

    def took(self, node: str, request_id: str) -> None:
        """Note a request placed on a node; its next report finishes it."""
        if not self._took:
            asyncio.get_running_loop().call_later(_TELL_S, self._tell)
        self._took.append(f"{node} {request_id}\n")

    def _tell(self) -> None:
        told, self._took = self._took, []
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("".join(told).encode())
            self._process.stdin.flush()


@contextlib.contextmanager
def reporting(address: str, nodes: int, sessions: int, every_s: float) -> Iterator[Reporting]:
    """Run a fleet that reports to the scheduler at `address`, on this process's cores."""
    command = [sys.executable, __file__, address, str(nodes), str(sessions), str(every_s)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    )
    try:
        yield Reporting(process)
    finally:
        process.terminate()
        process.wait(10)


async def _report(address: str, fleet: FakeFleet) -> None:
    took = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(took), sys.stdin)
    async with rpc.channel(address, SCHEDULER) as channel:
        running = asyncio.ensure_future(fleet.run(scheduler_pb2_grpc.SchedulerStub(channel)))  # type: ignore[no-untyped-call]
        while line := await took.readline():
            node, request_id = line.decode().split()
            fleet.nodes[node].took(request_id)
        running.cancel()


if __name__ == "__main__":
    os.nice(_NICE)
    asyncio.run(_report(sys.argv[1], FakeFleet(int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))))
