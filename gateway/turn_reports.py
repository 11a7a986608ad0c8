"""Sends turns' times to the schedulers, which show them with their decisions (`upbeat explain`).

Best effort: each second's records go in one batch to the scheduler that placed their turn. They are lost if it does not
answer, and the oldest are dropped if too many wait; both are counted.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping

import grpc

from contracts.convert import session_to_wire
from contracts.ids import SessionKey
from contracts.turn_times import MOST_TOGETHER, Phase
from contracts.v1 import scheduler_pb2 as pb
from gateway import metrics
from gateway.generate import Progress
from gateway.schedulers import Scheduler, Schedulers
from runtime import telemetry
from runtime.clock import Clock

log = telemetry.logger("gateway.turn_reports")
#: Queued records at most.
QUEUE_LIMIT = 4 * MOST_TOGETHER
#: Seconds between batches.
EVERY_S = 1.0
TELL_TIMEOUT_S = 1.0


class TurnReports:
    """The queue and its one sender. Invariant: at most `QUEUE_LIMIT` records are queued."""

    def __init__(self, schedulers: Schedulers, clock: Clock) -> None:
        self._schedulers, self._clock = schedulers, clock
        #: The address of the scheduler that placed the turn (or empty), its session, its record.
        self._waiting: deque[tuple[str, SessionKey, pb.TurnTimed]] = deque(maxlen=QUEUE_LIMIT)
        self._some = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    def note(self, session: SessionKey, progress: Progress) -> None:
        """Queue the record of a turn, unless it had no first token."""
        times = progress.times
        if not times.spoken:
            return
        if len(self._waiting) == QUEUE_LIMIT:
            metrics.TURN_RECORDS.labels("dropped").inc()
        until_first_s, after_s = _wire(times.until_first_s), _wire(times.after_s)
        record = pb.TurnTimed(
            session=session_to_wire(session),
            request_id=progress.attempt_id,
            until_first_s=until_first_s,
            after_s=after_s,
        )
        self._waiting.append((progress.decided_by, session, record))
        self._some.set()

    async def run(self) -> None:
        """Send queued records, for ever."""
        while await self._some.wait():
            await self._clock.sleep(EVERY_S)
            self._some.clear()
            waiting = list(self._waiting)
            self._waiting.clear()
            await asyncio.gather(
                *(self._tell(scheduler, records) for scheduler, records in self._by_scheduler(waiting))
            )

    def _by_scheduler(
        self, waiting: list[tuple[str, SessionKey, pb.TurnTimed]]
    ) -> list[tuple[Scheduler, list[pb.TurnTimed]]]:
        """Records by scheduler, without skipped schedulers: the one that decided, or the session's for a turn that used
        a route hint."""
        groups: dict[str, tuple[Scheduler, list[pb.TurnTimed]]] = {}
        for decided_by, session, record in waiting:
            found = self._schedulers.of(session)
            scheduler = next((s for s in found if s.address == decided_by or not decided_by), None)
            if scheduler is None:
                metrics.TURN_RECORDS.labels("lost").inc()
            else:
                groups.setdefault(scheduler.address, (scheduler, []))[1].append(record)
        return list(groups.values())

    async def _tell(self, scheduler: Scheduler, records: list[pb.TurnTimed]) -> None:
        """Send in messages of bounded size; after a failure the rest is lost. Unlike `Schedulers.tell`, a timeout here
        does not skip the scheduler: records must not change placement."""
        told = 0
        try:
            while told < len(records):
                message = pb.TurnsTimedRequest(turns=records[told : told + MOST_TOGETHER])
                await scheduler.stub.TurnsTimed(message, timeout=TELL_TIMEOUT_S)
                told += len(message.turns)
        except grpc.aio.AioRpcError as e:
            log.debug("records are lost", scheduler=scheduler.address, reason=f"{e.code().name}: {e.details()}")
        metrics.TURN_RECORDS.labels("told").inc(told)
        metrics.TURN_RECORDS.labels("lost").inc(len(records) - told)


def _wire(times: Mapping[Phase, float]) -> dict[str, float]:
    return {str(phase): seconds for phase, seconds in times.items()}
