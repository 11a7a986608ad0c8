"""A gateway's call of `Worker.Http`: many requests at a time (`relay.Passage` each), taken apart and put together.

An engine says a token of each request in one step. These pieces are gathered into one message, because a message costs
more than all else that is done for a piece.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass

from contracts.errors import BodyTooSlow, InvalidRequest, RequestError
from contracts.v1 import worker_pb2 as pb
from runtime import telemetry
from sidecar.relay import Passage, Relay

log = telemetry.logger("sidecar.calls")
#: Seconds for a request to arrive whole; the gateway has all of it before it begins.
BODY_S = 30.0
#: Seconds for which a piece waits for those of other answers. A server with 16 streams writes the pieces of a step
#: within about this time.
GATHER_S = 0.004
#: Bytes of answers in one message, but for its last piece.
_GATHERED_BYTES = 1 << 20
#: While more items wait to be sent, nothing is read from a gateway that reads nothing.
_MOST_WAITING = 4096


@dataclass(slots=True, eq=False)
class _Flight:
    """timer: until its body must be there. task: passes it on; None: its body is not there yet."""

    passage: Passage
    timer: asyncio.TimerHandle
    task: asyncio.Task[None] | None = None


class Call:
    """See the module. Invariant: `_flights` holds the requests that have begun and not ended, by number."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._flights: dict[int, _Flight] = {}
        self._downs: list[pb.HttpDown] = []
        #: There is something to send now; there is room for more.
        self._some, self._room = asyncio.Event(), asyncio.Event()
        #: Flights whose answer has begun, and those of them with a piece in `_downs`.
        self._answering, self._gathered = set[int](), set[int]()
        self._gathering: asyncio.TimerHandle | None = None

    async def answer(self, messages: AsyncIterator[pb.HttpUps]) -> AsyncGenerator[pb.HttpDowns, None]:
        """What the proto says of `Worker.Http`. Closing the generator cancels all requests."""
        reader = asyncio.ensure_future(self._read(messages))
        reader.add_done_callback(lambda _: self._some.set())
        try:
            while not reader.done():
                await self._some.wait()
                self._some.clear()
                while self._downs:
                    yield self._next()
            await reader
        finally:
            reader.cancel()
            tasks = [flight.task for flight in self._flights.values() if flight.task is not None]
            for number in tuple(self._flights):
                self._stop(number)
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, messages: AsyncIterator[pb.HttpUps]) -> None:
        async for message in messages:
            for up in message.ups:
                self._take(up)
            while len(self._downs) > _MOST_WAITING:
                self._room.clear()
                await self._room.wait()

    def _take(self, up: pb.HttpUp) -> None:
        number, kind = up.flight, up.WhichOneof("kind")
        flight = self._flights.get(number)
        if flight is None:
            if kind != "head":
                return  # of a flight that has just ended
            timer = asyncio.get_running_loop().call_later(BODY_S, self._too_slow, number)
            flight = self._flights[number] = _Flight(Passage(self._relay, number, self._say), timer)
        try:
            if kind == "head":
                flight.passage.begin(up.head)
            elif kind == "body":
                flight.passage.add(up.body.piece, last=up.body.last)
                if up.body.last:
                    self._pass_on(number, flight)
            elif kind == "taken":
                flight.passage.grant(up.taken)
            elif kind == "cancel":
                self._stop(number)
            else:
                raise InvalidRequest("this version of the sidecar cannot read that part of a request")
        except RequestError as e:
            flight.passage.refuse(e)
            self._stop(number)

    def _pass_on(self, number: int, flight: _Flight) -> None:
        flight.timer.cancel()
        flight.task = asyncio.create_task(self._passed_on(flight.passage))
        flight.task.add_done_callback(lambda _: self._end(number))

    async def _passed_on(self, passage: Passage) -> None:
        try:
            await passage.pass_on()
        except Exception:  # ours, and no other request's
            log.exception("a request failed")
            passage.fail("gave an answer that could not be passed on", ran=True)

    def _too_slow(self, number: int) -> None:
        self._flights[number].passage.refuse(BodyTooSlow(f"the request did not arrive whole within {BODY_S:g} s"))
        self._stop(number)

    def _stop(self, number: int) -> None:
        task = self._flights[number].task
        if task is None:
            self._end(number)
        else:
            task.cancel()

    def _end(self, number: int) -> None:
        flight = self._flights.pop(number)
        flight.timer.cancel()
        flight.passage.end()
        self._answering.discard(number)
        self._some.set()

    # ---- to the gateway ----------------------------------------------------------------------------------------
    def _say(self, down: pb.HttpDown) -> None:
        """Send it: the first item of an answer at once, others once each answer that has begun has a piece to send, or
        after a while. The end of an answer is sent with `_end`."""
        self._downs.append(down)
        first = down.flight not in self._answering
        self._answering.add(down.flight)
        self._gathered.add(down.flight)
        if first or len(self._gathered) >= len(self._answering):
            self._some.set()
        elif self._gathering is None:
            self._gathering = asyncio.get_running_loop().call_later(GATHER_S, self._some.set)

    def _next(self) -> pb.HttpDowns:
        size = count = 0
        for down in self._downs:
            count, size = count + 1, size + len(down.body)
            if size >= _GATHERED_BYTES:
                break
        message = pb.HttpDowns(downs=self._downs[:count])
        del self._downs[:count]
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        self._gathered.clear()
        self._room.set()
        return message
