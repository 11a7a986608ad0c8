"""Advisories and invalidations on their way to the scheduler: answered at once, told in the background, in order.

A hint is only a hint: when the scheduler is away or the queue is full it is dropped and counted, and the request that it
announced still works. Hints that wait together travel together.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from contracts.v1 import common_pb2
from contracts.v1 import scheduler_pb2 as pb
from gateway import metrics
from gateway.fleet import Fleet
from runtime import telemetry

log = telemetry.logger("gateway.hints")
QUEUE_LIMIT = 20_000
BATCH_LIMIT = 512
#: A hint that takes longer to tell is worth nothing.
TELL_TIMEOUT_S = 2.0


class Hints:
    """The queue and its one sender."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._queue: asyncio.Queue[Any] = asyncio.Queue(QUEUE_LIMIT)

    def advise(self, advisories: list[common_pb2.Advisory]) -> None:
        """Tell the scheduler soon, keeping the order."""
        for advisory in advisories:
            self._put("advisory", advisory)

    def invalidate(self, invalidation: pb.InvalidateRequest) -> None:
        """Tell the scheduler soon, after every advisory that came before."""
        self._put("invalidation", invalidation)

    def _put(self, kind: str, item: Any) -> None:
        try:
            self._queue.put_nowait(item)
        except asyncio.QueueFull:
            metrics.HINTS.labels(kind, "dropped").inc()

    async def run(self) -> None:
        """Send what is queued, for ever."""
        waiting: Any = None
        while True:
            first = waiting if waiting is not None else await self._queue.get()
            waiting = None
            if isinstance(first, pb.InvalidateRequest):
                await self._tell("invalidation", 1, self._fleet.scheduler.Invalidate, first)
                continue
            batch = [first]
            while len(batch) < BATCH_LIMIT and not self._queue.empty():
                item = self._queue.get_nowait()
                if isinstance(item, pb.InvalidateRequest):
                    waiting = item
                    break
                batch.append(item)
            await self._tell("advisory", len(batch), self._fleet.scheduler.Advise, pb.AdviseRequest(advisories=batch))

    async def _tell(self, kind: str, count: int, method: Any, message: Any) -> None:
        try:
            await method(message, timeout=TELL_TIMEOUT_S)
        except grpc.aio.AioRpcError as e:
            metrics.HINTS.labels(kind, "lost").inc(count)
            log.debug("hints lost", kind=kind, count=count, code=e.code().name)
        else:
            metrics.HINTS.labels(kind, "told").inc(count)
