"""Sends advisories and invalidations to the schedulers, in the background, each tenant's in order (`hint_queue`).

When no scheduler answers, or the queue or the tenant's share of it is full, a hint is dropped and counted; its request
still works. Queued hints are sent in batches.
"""

from __future__ import annotations

import asyncio
from typing import Any

from contracts.convert import session_from_wire
from contracts.errors import RequestError
from contracts.ids import SessionKey
from contracts.v1 import common_pb2
from contracts.v1 import scheduler_pb2 as pb
from gateway import metrics
from gateway.fleet import Fleet
from gateway.hint_queue import HintQueue
from gateway.schedulers import Scheduler
from runtime import telemetry

log = telemetry.logger("gateway.hints")
QUEUE_LIMIT = 20_000
BATCH_LIMIT = 512
#: Seconds between two messages at least: a message costs a gateway as much as a request.
TOGETHER_S = 0.02
#: A hint that takes longer is useless.
TELL_TIMEOUT_S = 2.0


class Hints:
    """The queue and its one sender."""

    def __init__(self, fleet: Fleet, share: float = 1.0) -> None:
        """share: the part of the queue for one tenant."""
        self._fleet = fleet
        self._waiting: HintQueue[common_pb2.Advisory, pb.InvalidateRequest] = HintQueue(QUEUE_LIMIT, share)
        self._some = asyncio.Event()

    def advise(self, advisories: list[common_pb2.Advisory]) -> None:
        """Tell the scheduler soon, keeping the order. An adapter's name becomes that of its model."""
        for advisory in advisories:
            advisory.model_id = self._fleet.base_of(advisory.model_id)
            self._note("advisory", self._waiting.advise(advisory.session.tenant, advisory))

    def invalidate(self, invalidation: pb.InvalidateRequest) -> None:
        """Tell the scheduler soon, after every advisory of the tenant that came before."""
        self._note("invalidation", self._waiting.invalidate(invalidation.session.tenant, invalidation))

    def _note(self, kind: str, taken: bool) -> None:
        if taken:
            self._some.set()
        else:
            metrics.HINTS.labels(kind, "dropped").inc()

    async def run(self) -> None:
        """Send queued hints, for ever."""
        loop, sent_s = asyncio.get_running_loop(), 0.0
        while await self._some.wait():
            # The first hint after a pause, a full message and invalidations go at once; other messages collect hints
            # for some milliseconds.
            pause_s = sent_s + TOGETHER_S - loop.time()
            if pause_s > 0 and len(self._waiting) < BATCH_LIMIT and not self._waiting.invalidates:
                await asyncio.sleep(pause_s)
            made = self._waiting.next(BATCH_LIMIT)
            if made.advisories:
                sent_s = loop.time()
                await self._advise(made.advisories)
            await asyncio.gather(*map(self._withdraw, made.invalidations))
            if not self._waiting:
                self._some.clear()

    async def _advise(self, batch: list[common_pb2.Advisory]) -> None:
        """Send each advisory to its session's scheduler, or to the next one if that does not answer."""
        schedulers, silent = self._fleet.schedulers, set[str]()
        left = [(session_from_wire(advisory.session), advisory) for advisory in batch]
        while left:
            groups: dict[str, tuple[Scheduler, list[tuple[SessionKey, common_pb2.Advisory]]]] = {}
            for hint in left:
                scheduler = next((s for s in schedulers.of(hint[0]) if s.address not in silent), None)
                if scheduler is not None:
                    groups.setdefault(scheduler.address, (scheduler, []))[1].append(hint)
            messages = [
                (s, pb.AdviseRequest(advisories=[advisory for _, advisory in group])) for s, group in groups.values()
            ]
            told = await asyncio.gather(*(self._tell(s, "Advise", message) for s, message in messages))
            reached = sum(len(group) for _, group in groups.values())
            metrics.HINTS.labels("advisory", "lost").inc(len(left) - reached)
            left = []
            for (scheduler, group), answer in zip(groups.values(), told, strict=True):
                if answer is not None:
                    metrics.HINTS.labels("advisory", "told").inc(len(group))
                    for (session, _), placed in zip(group, answer.placements, strict=False):
                        self._fleet.note_route_hint(session, placed)
                else:
                    silent.add(scheduler.address)
                    left += group

    async def _withdraw(self, invalidation: pb.InvalidateRequest) -> None:
        """Send it to the session's scheduler, then to the others until one knows the hint, which may have been sent
        while the first was down."""
        session = session_from_wire(invalidation.session) if invalidation.session.session_id else None
        if session is not None:
            self._fleet.route_hints.forget(session)
        told = False
        for scheduler in self._fleet.schedulers.of(session):
            answer = await self._tell(scheduler, "Invalidate", invalidation)
            told = told or answer is not None
            if answer is not None and answer.known:
                break
        metrics.HINTS.labels("invalidation", "told" if told else "lost").inc()

    async def _tell(self, scheduler: Scheduler, method: str, message: Any) -> Any:
        try:
            return await self._fleet.schedulers.tell(scheduler, method, message, TELL_TIMEOUT_S)
        except RequestError as e:
            log.debug("a hint was refused", call=method, error=e.message)
            return None
