"""A scheduler that only listens to stores and tells them what a test wants."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from contracts.v1 import common_pb2
from contracts.v1 import scheduler_pb2 as pb
from contracts.v1.scheduler_pb2_grpc import SchedulerServicer, add_SchedulerServicer_to_server
from runtime import rpc

LIMIT_S = 30.0


class FakeScheduler(SchedulerServicer):
    """`held[node][session_id]` is the last report; use as an async context manager."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._changed = asyncio.Condition()
        self._streams: dict[str, asyncio.Queue[pb.StoreCommand]] = {}
        self.held: dict[str, dict[str, pb.Held]] = {}
        self.loads: dict[str, pb.StoreLoad] = {}
        self.erased: dict[str, list[pb.Erased]] = {}
        self.leaving: dict[str, list[pb.StoreLeaving]] = {}
        self.full_reports = 0
        #: Hellos of each node: a store that was killed and started again says one more.
        self.hellos: Counter[str] = Counter()

    async def __aenter__(self) -> FakeScheduler:
        self._server, _ = rpc.server(self._address, ["upbeat.v1.Scheduler"])
        add_SchedulerServicer_to_server(self, self._server)
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(0)

    async def StoreReports(
        self, reports: AsyncIterator[pb.StoreReport], context: Any
    ) -> AsyncIterator[pb.StoreCommand]:
        commands: asyncio.Queue[pb.StoreCommand] = asyncio.Queue()
        reading = asyncio.ensure_future(self._read(reports, commands))
        try:
            while True:
                yield await commands.get()
        finally:
            reading.cancel()

    async def _read(self, reports: AsyncIterator[pb.StoreReport], commands: asyncio.Queue[pb.StoreCommand]) -> None:
        node = ""
        async for report in reports:
            kind = report.WhichOneof("kind")
            if kind == "hello":
                node = report.hello.node
                self._streams[node] = commands
                self.hellos[node] += 1
                self.held[node] = {}
            elif kind == "held":
                if report.held.full:
                    self.full_reports += 1
                    self.held[node] = {}
                for held in report.held.sessions:
                    self.held[node][held.session.session_id] = held
            elif kind == "erased":
                self.erased.setdefault(node, []).append(report.erased)
            elif kind == "leaving":
                self.leaving.setdefault(node, []).append(report.leaving)
            elif kind == "load":
                self.loads[node] = report.load
            async with self._changed:
                self._changed.notify_all()

    async def wait(self, condition: Any) -> None:
        """Until `condition(self)` holds."""
        async with asyncio.timeout(LIMIT_S), self._changed:
            await self._changed.wait_for(lambda: condition(self))

    async def tell(self, node: str, **kind: Any) -> None:
        """Send a command once the node has said hello."""
        await self.wait(lambda s: node in s._streams)
        self._streams[node].put_nowait(pb.StoreCommand(**kind))

    async def advise(
        self,
        node: str,
        session_id: str,
        *,
        sources: tuple[str, ...] = (),
        arrival_s: float = 2.0,
        device: int = 0,
        trace: str = "",
    ) -> None:
        """A prefetch command."""
        advisory = common_pb2.Advisory(
            session=wire_session(session_id), expected_arrival_s=arrival_s, ttl_s=60.0, advisory_id="a", trace=trace
        )
        await self.tell(node, prefetch=pb.PrefetchCommand(advisory=advisory, source_nodes=sources, device=device))


def wire_session(session_id: str) -> common_pb2.Session:
    return common_pb2.Session(tenant="default", session_id=session_id)
