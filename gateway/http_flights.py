"""A request whose answer comes as an engine's HTTP (`HttpFlight`): one call of `Worker.Http`.

Nothing is queued here. The reader takes one piece after the other, and while it takes none, gRPC's flow control stops
the worker, and the worker its engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from contracts.errors import RequestError, Unavailable
from contracts.v1 import worker_pb2 as pb
from gateway.core.overdue import Waits, late
from gateway.core.refusals import refusal
from gateway.flights import Carried, Event, Late, WorkerLost
from runtime import telemetry
from runtime.clock import Clock

log = telemetry.logger("gateway.http_flights")
#: Bytes of a body in one message.
PIECE_BYTES = 1 << 20


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
    """What an `HttpFlight` needs of its backend."""

    node: str

    def drop(self, flight: Carried) -> None:
        """Forget the request and cancel it on the node."""

    def forget(self, flight: Carried) -> None:
        """The request has ended."""

    def hear(self) -> None:
        """The worker has sent something."""

    def lost(self, flight: Carried) -> WorkerLost:
        """The request's call broke off. Forgets the request."""


class HttpFlight:
    """One call. Call `next` until it returns None, an HttpFailed, a WorkerLost or a Late, or call `cancel`."""

    def __init__(
        self,
        stream: HttpCarrier,
        head: pb.HttpRequest,
        body: bytes,
        clock: Clock,
        *,
        timed: bool,
        pinned: bool = False,
    ) -> None:
        """timed: the first byte of the answer takes no longer than a first token. A whole text may take any time."""
        self.stream, self.request_id, self.pinned, self.begun_s = stream, head.request_id, pinned, clock.now()
        self.sent = self.spoken = self.shared = self.ended = False
        #: When the worker had the whole request.
        self.accepted_s: float | None = None
        self._head, self._body, self._clock, self._timed = head, body, clock, timed
        self._call: Any = None
        #: The end, when it comes from elsewhere than the call.
        self._broken: WorkerLost | Late | None = None

    @property
    def node(self) -> str:
        """The node that runs it."""
        return self.stream.node

    def begin(self, stub: Any) -> None:
        """Send the request."""
        self._call = stub.Http(self._up())

    async def next(self) -> HttpHead | bytes | HttpFailed | WorkerLost | Late | None:
        """The next event; None: the answer is complete. Cancelling the task that waits here cancels the call."""
        if self._broken is not None:
            return self._broken
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as e:
            log.info("a call was lost", node=self.node, reason=f"{e.code().name}: {e.details()}")
            return self._lost()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return self._lost()  # `deliver`, or its channel was closed
        if not isinstance(message, pb.HttpDown):
            self._end()
            return None
        self.stream.hear()
        return self._event(message)

    def late(self, waits: Waits, now: float) -> str:
        """See `Carried`."""
        spoken = self.spoken or (not self._timed and self.accepted_s is not None)
        return late(waits, now, self.begun_s, self.accepted_s, spoken, alone=False)

    def deliver(self, event: Event, now: float) -> None:
        """End with a WorkerLost or a Late; frames do not concern it."""
        if isinstance(event, WorkerLost | Late):
            self.ended, self._broken = True, event
            self._call.cancel()

    def stop(self) -> None:
        """See `Carried`."""
        self._call.cancel()

    def cancel(self) -> None:
        """Cancel it in the worker unless it has ended. Safe to call twice."""
        if not self.ended:
            self.ended = True
            self.stream.drop(self)

    async def _up(self) -> AsyncIterator[pb.HttpUp]:
        yield pb.HttpUp(head=self._head)
        body, self._body = memoryview(self._body), b""
        for at in range(0, len(body), PIECE_BYTES):
            self.sent = at + PIECE_BYTES >= len(body)
            yield pb.HttpUp(body=bytes(body[at : at + PIECE_BYTES]))
        self.accepted_s = self._clock.now()

    def _event(self, message: pb.HttpDown) -> HttpHead | bytes | HttpFailed:
        kind = message.WhichOneof("kind")
        if kind == "body":
            self.spoken = True
            return message.body
        if kind == "head":
            return HttpHead(message.head.status, [(h.name, h.value) for h in message.head.headers])
        failed = message.failed
        self._end()
        self._call.cancel()  # nothing follows
        error = refusal(failed.refused) or Unavailable(f"{self.node} failed without saying why")
        return HttpFailed(error, failed.ran, failed.only)

    def _lost(self) -> WorkerLost | Late:
        self.ended = True
        if self._broken is None:
            self._broken = self.stream.lost(self)
        return self._broken

    def _end(self) -> None:
        self.ended = True
        self.stream.forget(self)
