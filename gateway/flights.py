"""A request on one worker: what its backend needs of it (`Carried`), and one that is answered in frames (`Flight`)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from contracts.request import Accepted, Failed, GenerateRequest, Output
from gateway.core.overdue import Waits, late
from gateway.core.quarantine import Verdict


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The stream to `node` ended while this request was on it, or was never up. hung: the stream is up, but the worker
    makes no progress. only: no other request of this gateway was on it meanwhile."""

    node: str
    verdict: Verdict = Verdict.INNOCENT
    hung: bool = False
    only: bool = False


@dataclass(frozen=True, slots=True)
class Late:
    """The worker did not answer in time and the request was cancelled there. reason: for a human."""

    node: str
    reason: str


Event = Accepted | Output | Failed | WorkerLost | Late


class Carried(Protocol):
    """A request on a backend, whatever the wire. pinned: no other node may run it. sent: the worker may have the whole
    request. spoken: a part of its answer has arrived. shared: another request was on the backend meanwhile. ended: no
    event follows."""

    request_id: str
    pinned: bool
    sent: bool
    spoken: bool
    shared: bool
    ended: bool

    def late(self, waits: Waits, now: float) -> str:
        """What the worker has not sent in time, for a human; empty: nothing."""

    def deliver(self, event: Event, now: float) -> None:
        """The backend has an event for the request."""

    def stop(self) -> None:
        """Cancel it on the node. Its backend has forgotten it."""


class Carrier(Protocol):
    """What a `Flight` needs of its backend (`gateway.backend.Backend`)."""

    node: str

    def drop(self, flight: Carried) -> None:
        """Forget the request and cancel it on the node."""

    def withdraw(self, request_id: str) -> None:
        """Tell the node to cancel the request."""


class Flight:
    """A request whose answer comes as frames, and the queue of its events. The last event is an Output with a finish
    reason, a Failed, a WorkerLost or a Late."""

    def __init__(self, stream: Carrier, request: GenerateRequest, now: float, *, pinned: bool = False) -> None:
        self.pinned = pinned
        self.stream, self.request_id, self.alone = stream, request.request_id, request.alone
        self.begun_s = now
        self.accepted_s: float | None = None
        self.sent = self.spoken = self.shared = False
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

    def late(self, waits: Waits, now: float) -> str:
        """See `Carried`."""
        return late(waits, now, self.begun_s, self.accepted_s, self.spoken, alone=self.alone)

    def deliver(self, event: Event, now: float) -> None:
        """Queue an event; never blocks the stream."""
        if isinstance(event, Output):
            self.spoken, self.ended = True, event.finish_reason is not None
        elif isinstance(event, Accepted):
            self.accepted_s = now
        else:
            self.ended = True
        self._events.append(event)
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)

    def cancel(self) -> None:
        """Cancel it in the worker unless it has ended. Safe to call twice."""
        if not self.ended:
            self.ended = True
            self.stream.drop(self)

    def stop(self) -> None:
        """See `Carried`."""
        self.stream.withdraw(self.request_id)
