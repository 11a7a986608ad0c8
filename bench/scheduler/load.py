"""Places turns at a scheduler, in a closed loop or at a fixed rate, and measures latencies."""

from __future__ import annotations

import asyncio
import gc
import random
import statistics
import time
from typing import Any

from fakes import MODEL, Reporting

from contracts.v1 import common_pb2, scheduler_pb2
from gateway.placing import Placing

_TIMEOUT_S = 60.0


class Load:
    """Turns of random sessions. Latencies are in seconds."""

    def __init__(self, stub: Any, fleet: Reporting, sessions: int) -> None:
        self._placing, self._fleet, self._sessions = Placing(stub), fleet, sessions
        self._draw, self._count = random.Random(7), 0
        #: Failed calls; a gateway then continues without the scheduler.
        self.failed = 0

    async def _place(self, took: list[float]) -> None:
        self._count += 1
        session = common_pb2.Session(tenant="t", session_id=f"s{self._draw.randrange(self._sessions)}")
        request = scheduler_pb2.PlaceRequest(request_id=f"r{self._count}", session=session, model=MODEL)
        began = time.perf_counter()
        try:
            answer = await self._placing.ask(request, _TIMEOUT_S)
        except OSError:
            self.failed += 1
            return
        if not answer.HasField("placed"):
            self.failed += 1
            return
        took.append(time.perf_counter() - began)
        self._fleet.took(answer.placed.node, request.request_id)

    async def most(self, seconds: float, at_once: int) -> float:
        """Placements per second of `callers` callers in a closed loop."""
        took: list[float] = []
        end = time.perf_counter() + seconds

        async def caller() -> None:
            while time.perf_counter() < end:
                await self._place(took)

        began = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(at_once)))
        return len(took) / (time.perf_counter() - began)

    async def at_rate(self, per_s: float, seconds: float) -> dict[str, float]:
        """Random arrivals, open loop: answers per second and their latencies in milliseconds."""
        took: list[float] = []
        due, began, tasks = 0.0, time.perf_counter(), []
        gc.disable()  # keep this process's garbage collection out of the latencies
        while due < seconds:
            due += self._draw.expovariate(per_s)
            wait_s = began + due - time.perf_counter()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            tasks.append(asyncio.ensure_future(self._place(took)))
        await asyncio.gather(*tasks)
        gc.enable()
        quantiles = statistics.quantiles(took, n=100)
        return {
            "offered_per_s": per_s,
            "placed_per_s": round(len(took) / (time.perf_counter() - began)),
            "p50_ms": round(quantiles[49] * 1e3, 3),
            "p99_ms": round(quantiles[98] * 1e3, 3),
        }
