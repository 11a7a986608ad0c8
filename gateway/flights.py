"""One request on one worker, as the worker's stream tells of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from contracts.request import Accepted, Failed, GenerateRequest, Output
from gateway.core.quarantine import Verdict

if TYPE_CHECKING:
    from gateway.backend import Backend


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The stream to `node` ended, or never stood, while this request was on it. hung: it stands, and the worker does not get on."""

    node: str
    verdict: Verdict = Verdict.INNOCENT
    hung: bool = False


@dataclass(frozen=True, slots=True)
class Late:
    """The worker was not heard of in time, and the request is no longer on it. reason: for a human."""

    node: str
    reason: str


Event = Accepted | Output | Failed | WorkerLost | Late


class Flight:
    """See the module. Ends with an Output that has a finish reason, a Failed, a WorkerLost or a Late."""

    def __init__(self, stream: Backend, request: GenerateRequest, now: float, *, pinned: bool = False) -> None:
        self.pinned = pinned
        self.stream, self.request_id, self.alone = stream, request.request_id, request.alone
        self.begun_s = now
        self.accepted_s: float | None = None
        #: The worker may have all of the request; something has come of its answer.
        self.sent = self.spoken = False
        self._events: list[Event] = []
        #: Set while somebody waits for an event; there is one reader.
        self._reader: asyncio.Future[None] | None = None
        #: No event comes after those already queued.
        self.ended = False

    @property
    def node(self) -> str:
        """Where it runs."""
        return self.stream.node

    @property
    def waiting(self) -> bool:
        """Events have come that nobody has taken."""
        return bool(self._events)

    async def next(self) -> Event:
        """The next event, in the worker's order."""
        await self._some()
        return self._events.pop(0)

    async def take(self) -> list[Event]:
        """All that have come since, in the worker's order; waits for the first."""
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
        """End it in the worker, at once, unless it has ended. Safe to call twice."""
        if not self.ended:
            self.ended = True
            self.stream.drop(self)
