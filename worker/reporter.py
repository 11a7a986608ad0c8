"""The worker's long-lived stream of reports to the scheduler; opened again, for ever, when it breaks."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from contracts.convert import shape_to_wire
from contracts.v1 import scheduler_pb2, scheduler_pb2_grpc
from runtime import rpc, telemetry
from worker.engine import Engine

log = telemetry.logger("worker.reporter")
EVERY_S = 0.1
RETRY_S = 0.3
#: Metrics go with every so many reports.
METRICS_EVERY = 10


class Reporter:
    """Tells the scheduler that this worker serves, what it has to do, and which requests have ended."""

    def __init__(
        self,
        engine: Engine,
        *,
        scheduler: str,
        node: str,
        address: str,
        max_tokens: int,
        created_s: int,
        rates: dict[str, float],
        draining: Callable[[], bool],
    ) -> None:
        """`rates`: bytes a second from `peer`, `ssd` and `blob`, as far as they were measured."""
        self.engine, self.scheduler, self.node, self.address = engine, scheduler, node, address
        self.max_tokens, self.created_s, self.rates, self.draining = max_tokens, created_s, rates, draining
        self._instance = uuid.uuid4().hex

    async def run(self) -> None:
        """Report until cancelled."""
        channel = rpc.channel(self.scheduler)
        stub: Any = scheduler_pb2_grpc.SchedulerStub(channel)  # type: ignore[no-untyped-call]
        try:
            while True:
                try:
                    async for _ in stub.WorkerReports(self._reports()):
                        pass
                except grpc.aio.AioRpcError as e:
                    log.debug("scheduler not reached", reason=e.details())
                await asyncio.sleep(RETRY_S)
        finally:
            await channel.close(None)

    async def _reports(self) -> AsyncIterator[scheduler_pb2.WorkerReport]:
        model = scheduler_pb2.ModelInfo(
            name=self.engine.model_name, shape=shape_to_wire(self.engine.device.shape), max_tokens=self.max_tokens, created_s=self.created_s
        )
        hello = scheduler_pb2.WorkerHello(
            node=self.node,
            address=self.address,
            models=[model],
            instance=self._instance,
            **{f"{source}_bytes_per_s": rate for source, rate in self.rates.items()},
        )
        yield scheduler_pb2.WorkerReport(hello=hello)
        turn = 0
        while True:
            if turn % METRICS_EVERY == 0:
                yield scheduler_pb2.WorkerReport(metrics=scheduler_pb2.ProcessMetrics(samples=telemetry.samples()))
            turn += 1
            counts, finished = self.engine.counts, []
            while self.engine.finished:
                finished.append(self.engine.finished.popleft())
            load = scheduler_pb2.WorkerLoad(
                running=counts.running,
                waiting=counts.waiting,
                outstanding_tokens=counts.outstanding_tokens,
                outstanding_s=sum(counts.outstanding_s.values()),
                request_s=counts.request_s,
                hbm_pages_total=counts.pages_total,
                hbm_pages_free=counts.pages_free,
                in_flight=counts.in_flight,
                finished=finished,
                prefill_token_s=counts.prefill_token_s,
                outstanding_by_priority=counts.outstanding_s,
                number=turn,
                draining=self.draining(),
            )
            yield scheduler_pb2.WorkerReport(load=load)
            await asyncio.sleep(EVERY_S)
