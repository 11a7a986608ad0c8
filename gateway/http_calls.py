"""The call of `Worker.Http` to one worker: it carries all requests of this process to the engine's HTTP.

It is opened for the first of them and lives no longer than the worker's stream. When it breaks off, each of its flights
gets a `WorkerLost`, and the next request opens another.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import Any

import grpc

from contracts.http_flights import PIECE_BYTES
from contracts.v1 import worker_pb2 as pb
from gateway.core.body_turns import BodyTurns
from gateway.http_flights import HttpCarrier, HttpFlight
from runtime import telemetry
from runtime.clock import Clock

log = telemetry.logger("gateway.http_calls")


class HttpCall:
    """See the module. Invariant: `_flights` holds those that have not ended; none once the call has."""

    def __init__(self, stream: HttpCarrier, stub: Any, clock: Clock) -> None:
        self.ended = False
        self._stream, self._clock = stream, clock
        self._flights: dict[int, HttpFlight] = {}
        self._last = 0
        #: What waits to be sent: all but bodies, and these.
        self._ups, self._bodies, self._some = deque[pb.HttpUp](), BodyTurns(), asyncio.Event()
        self._call = stub.Http()
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]

    def begin(self, head: pb.HttpRequest, body: bytes, *, timed: bool, pinned: bool) -> HttpFlight:
        """Send a request."""
        self._last += 1
        number = self._last
        flight = HttpFlight(self._stream, self, number, head.request_id, self._clock.now(), timed=timed, pinned=pinned)
        self._flights[number] = flight
        self._bodies.add(number, body)
        self._send(pb.HttpUp(flight=number, head=head))
        return flight

    def grant(self, flight: int, taken_bytes: int) -> None:
        """See `Sender`."""
        self._send(pb.HttpUp(flight=flight, taken=taken_bytes))

    def cancel(self, flight: int) -> None:
        """See `Sender`."""
        if self._forget(flight):
            self._send(pb.HttpUp(flight=flight, cancel=True))

    def close(self, reason: str) -> None:
        """End the call. Flights that have not ended are lost."""
        if self.ended:
            return
        self.ended = True
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        flights, self._flights = self._flights, {}
        if flights:
            log.info("a call was lost", node=self._stream.node, requests=len(flights), reason=reason)
        for flight in flights.values():
            if not flight.ended:
                flight.deliver(self._stream.lost(flight), self._clock.now())

    def _forget(self, flight: int) -> bool:
        """Whether it was there. What is left of its body is not sent."""
        self._bodies.drop(flight)
        return self._flights.pop(flight, None) is not None

    def _send(self, up: pb.HttpUp) -> None:
        self._ups.append(up)
        self._some.set()

    async def _read(self) -> None:
        reason = "the worker ended it"
        try:
            async for message in self._call:
                self._stream.hear()
                for down in message.downs:
                    flight = self._flights.get(down.flight)
                    if flight is None:
                        continue  # just cancelled
                    flight.hear(down)
                    if flight.ended:
                        self._forget(down.flight)
        except grpc.aio.AioRpcError as e:
            reason = f"{e.code().name}: {e.details()}"
        finally:
            self.close(reason)

    async def _write(self) -> None:
        # The reader sees the call's end too, and says why.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await self._some.wait()
                ups, whole = self._next()
                for flight in whole:
                    flight.sent = True
                if ups:
                    await self._call.write(pb.HttpUps(ups=ups))
                for flight in whole:
                    flight.accepted_s = self._clock.now()

    def _next(self) -> tuple[list[pb.HttpUp], list[HttpFlight]]:
        """What is sent next, and the flights whose request is complete with it."""
        ups: list[pb.HttpUp] = []
        whole: list[HttpFlight] = []
        size = 0
        while self._ups and size < PIECE_BYTES:
            ups.append(self._ups.popleft())
            size += ups[-1].ByteSize()
        room = PIECE_BYTES
        # A body comes after its head.
        while not self._ups and room and (piece := self._bodies.next(room)) is not None:
            number, part, last = piece
            room -= len(part)
            ups.append(pb.HttpUp(flight=number, body=pb.HttpBody(piece=part, last=last)))
            if last and number in self._flights:
                whole.append(self._flights[number])
        if not self._ups and not self._bodies:
            self._some.clear()
        return ups, whole
