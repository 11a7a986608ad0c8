"""A request whose answer comes as an engine's HTTP (`HttpFlight`), one of many on its worker's call (`HttpCall`).

What the reader has not taken waits here, `WINDOW_BYTES` at most. While it takes none, the worker sends no more of this
answer, and stops its engine; other answers go on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from contracts.errors import RequestError, Unavailable
from contracts.http_flights import WINDOW_BYTES
from contracts.v1 import worker_pb2 as pb
from gateway.core.overdue import Waits, late
from gateway.core.refusals import refusal
from gateway.flights import Carried, Event, Late, WorkerLost


@dataclass(frozen=True, slots=True)
class HttpHead:
    """The engine's answer begins."""

    status: int
    headers: list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class HttpFailed:
    """The worker has no answer, or no more of it. ran: the engine had the request, and may have died of it. only: no
    other request was on the engine."""

    error: RequestError
    ran: bool = False
    only: bool = False


class HttpCarrier(Protocol):
    """What a flight and its call need of their backend."""

    node: str

    def drop(self, flight: Carried) -> None:
        """Forget the request and cancel it on the node."""

    def forget(self, flight: Carried) -> None:
        """The request has ended."""

    def hear(self) -> None:
        """The worker has sent something."""

    def lost(self, flight: Carried) -> WorkerLost:
        """The request's call broke off. Forgets the request."""


class Sender(Protocol):
    """What a flight needs of its call."""

    def grant(self, flight: int, taken_bytes: int) -> None:
        """The worker may send so many more bytes of this answer."""

    def cancel(self, flight: int) -> None:
        """Forget this flight and cancel it in the worker."""


class HttpFlight:
    """See the module. Call `next` until it returns None, an HttpFailed, a WorkerLost or a Late, or call `cancel`. There
    is one HttpHead, before all pieces and before None.

    Invariant: the pieces that wait have `WINDOW_BYTES` at most."""

    def __init__(
        self,
        stream: HttpCarrier,
        call: Sender,
        number: int,
        request_id: str,
        begun_s: float,
        *,
        timed: bool,
        pinned: bool = False,
    ) -> None:
        """number: of the flight in its call. timed: the first byte of the answer takes no longer than a first token. A
        whole text may take any time."""
        self.stream, self.number, self.request_id = stream, number, request_id
        self.begun_s, self.pinned = begun_s, pinned
        self.sent = self.spoken = self.shared = self.ended = False
        #: When the worker had the whole request.
        self.accepted_s: float | None = None
        self._call, self._timed, self._headed = call, timed, False
        #: Bytes that the worker may send, and those that the reader has taken since it was told so.
        self._open, self._taken = WINDOW_BYTES, 0
        self._events: deque[HttpHead | bytes | HttpFailed | WorkerLost | Late | None] = deque()
        #: Set while the only reader waits for an event.
        self._reader: asyncio.Future[None] | None = None

    @property
    def node(self) -> str:
        """The node that runs it."""
        return self.stream.node

    async def next(self) -> HttpHead | bytes | HttpFailed | WorkerLost | Late | None:
        """The next event; None: the answer is complete."""
        while not self._events:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        event = self._events.popleft()
        if isinstance(event, bytes):
            self._taken += len(event)
            if 2 * self._taken >= WINDOW_BYTES and not self.ended:
                self._call.grant(self.number, self._taken)
                self._open += self._taken
                self._taken = 0
        return event

    def hear(self, down: pb.HttpDown) -> None:
        """The worker has said something of it."""
        kind = down.WhichOneof("kind")
        if kind == "body" and self._headed:
            piece = down.body
            self._open -= len(piece) or 1
            if self._open < 0:
                self._refuse("more of an answer than it may")
                return
            self.spoken = True
            self._put(piece)
        elif kind == "head" and not self._headed:
            self._headed = True
            self._put(HttpHead(down.head.status, [(h.name, h.value) for h in down.head.headers]))
        elif kind == "failed":
            error = refusal(down.failed.refused) or Unavailable(f"{self.node} failed without saying why")
            self._end(HttpFailed(error, down.failed.ran, down.failed.only))
        elif kind == "end" and self._headed:
            self._end(None)
        else:
            self._refuse("an answer without a head" if not self._headed else "an answer with two heads")

    def late(self, waits: Waits, now: float) -> str:
        """See `Carried`."""
        spoken = self.spoken or (not self._timed and self.accepted_s is not None)
        return late(waits, now, self.begun_s, self.accepted_s, spoken, alone=False)

    def deliver(self, event: Event, now: float) -> None:
        """End with a WorkerLost or a Late, after what has come; frames do not concern it."""
        if isinstance(event, WorkerLost | Late):
            self.ended = True
            self._put(event)

    def stop(self) -> None:
        """See `Carried`."""
        self._call.cancel(self.number)

    def cancel(self) -> None:
        """Cancel it in the worker unless it has ended. Safe to call twice."""
        if not self.ended:
            self.ended = True
            self.stream.drop(self)

    def _refuse(self, what: str) -> None:
        """The worker does not keep to the protocol."""
        self.cancel()
        self._put(HttpFailed(Unavailable(f"{self.node} sent {what}"), ran=True))

    def _end(self, event: HttpFailed | None) -> None:
        self.ended = True
        self.stream.forget(self)
        self._put(event)

    def _put(self, event: HttpHead | bytes | HttpFailed | WorkerLost | Late | None) -> None:
        self._events.append(event)
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)
