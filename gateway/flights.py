"""One request on one worker, and the queue of its events."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from contracts.request import Accepted, Failed, GenerateRequest, Output
from gateway.core.quarantine import Verdict


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The stream to `node` ended while this request was on it, or was never up. hung: the stream is up, but the worker
    makes no progress."""

    node: str
    verdict: Verdict = Verdict.INNOCENT
    hung: bool = False


@dataclass(frozen=True, slots=True)
class Late:
    """The worker did not answer in time and the request was cancelled there. reason: for a human."""

    node: str
    reason: str


Event = Accepted | Output | Failed | WorkerLost | Late


class Carrier(Protocol):
    """What a flight needs of its backend (`gateway.backend.Backend`)."""

    node: str

    def drop(self, flight: Flight) -> None:
        """Forget the flight and cancel it on the node."""


class Flight:
    """One request on one worker. The last event is an Output with a finish reason, a Failed, a WorkerLost or a Late."""

    def __init__(self, stream: Carrier, request: GenerateRequest, now: float, *, pinned: bool = False) -> None:
        self.pinned = pinned
        self.stream, self.request_id, self.alone = stream, request.request_id, request.alone
        self.begun_s = now
        self.accepted_s: float | None = None
        #: sent: the worker may have the whole request. spoken: an Output has arrived.
        self.sent = self.spoken = False
        self._events: list[Event] = []
        #: Set while the only reader waits for an event.
        self._reader: asyncio.Future[None] | None = None
        #: No event comes after those already queued.
        self.ended = False

    @property
    def node(self) -> str:
        """The node that runs it."""
        return self.stream.node

    @property
    def waiting(self) -> bool:
        """Whether events are queued."""
        return bool(self._events)

    async def next(self) -> Event:
        """The next event, in the worker's order."""
        await self._some()
        return self._events.pop(0)

    async def take(self) -> list[Event]:
        """All queued events, in the worker's order; waits for the first."""
        await self._some()
        events, self._events = self._events, []
        return events

    async def _some(self) -> None:
        while not self._events:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader

    def deliver(self, event: Event) -> None:
        """Queue an event; never blocks the stream."""
        if isinstance(event, Output):
            self.spoken, self.ended = True, event.finish_reason is not None
        else:
            self.ended = not isinstance(event, Accepted)
        self._events.append(event)
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)

    def cancel(self) -> None:
        """Cancel it in the worker unless it has ended. Safe to call twice."""
        if not self.ended:
            self.ended = True
            self.stream.drop(self)
