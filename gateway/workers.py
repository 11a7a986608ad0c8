"""The streams to the workers: one a worker, kept up for as long as the fleet names it.

Requests go in as frames; every engine step comes back as one frame that is taken apart into per-request queues (a
`Flight` each). When a stream ends, each flight on it gets a `WorkerLost`; what to do about that is decided elsewhere.
A worker that loses its stream cancels what ran on it, so nothing is left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any

import grpc

from contracts import frames
from contracts.request import Accepted, Failed, GenerateRequest, Output
from contracts.v1 import worker_pb2, worker_pb2_grpc
from gateway import metrics
from runtime import rpc, telemetry
from runtime.clock import Clock
from runtime.service import Tasks

log = telemetry.logger("gateway.workers")
_REST_S = (0.1, 0.2, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The stream to `node` ended while this request was on it."""

    node: str


Event = Accepted | Output | Failed | WorkerLost


class Flight:
    """One request on one worker. Ends with an Output that has a finish reason, a Failed or a WorkerLost."""

    def __init__(self, stream: WorkerStream, request_id: str) -> None:
        self.stream, self.request_id = stream, request_id
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
        self.ended = isinstance(event, Failed | WorkerLost) or (isinstance(event, Output) and event.finish_reason is not None)
        self._events.append(event)
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)

    def cancel(self) -> None:
        """End it in the worker, at once, unless it has ended. Safe to call twice."""
        if not self.ended:
            self.ended = True
            self.stream.drop(self)


class WorkerStream:
    """The stream to one worker. Invariant: `flights` holds exactly the requests submitted on the standing connection
    that have not ended."""

    def __init__(self, node: str, address: str, clock: Clock) -> None:
        self.node, self.address, self._clock = node, address, clock
        self.flights: dict[str, Flight] = {}
        self._up = asyncio.Event()
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()

    @property
    def connected(self) -> bool:
        """A connection stands."""
        return self._up.is_set()

    async def submit(self, request: GenerateRequest, connect_s: float) -> Flight | WorkerLost:
        """Start `request` here; WorkerLost when no connection stands within `connect_s` seconds."""
        if not self.connected:
            try:
                async with asyncio.timeout(connect_s):
                    await self._up.wait()
            except TimeoutError:
                return WorkerLost(self.node)
        flight = Flight(self, request.request_id)
        self.flights[request.request_id] = flight
        self._outbox.put_nowait(frames.encode_submit(request))
        return flight

    def drop(self, flight: Flight) -> None:
        """Forget a flight and tell the worker."""
        if self.flights.pop(flight.request_id, None) is not None:
            self._outbox.put_nowait(frames.encode_cancel(flight.request_id))

    async def run(self) -> None:
        """Keep the connection up, for ever."""
        failures = 0
        async with rpc.channel(self.address) as channel:
            stub: Any = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
            while True:
                outbox: asyncio.Queue[bytes] = asyncio.Queue()
                self._outbox = outbox
                call = stub.Stream(wait_for_ready=True)
                writer = asyncio.create_task(_write(call, outbox))
                try:
                    await call.wait_for_connection()
                    self._up.set()
                    metrics.STREAMS.inc()
                    log.info("stream up", node=self.node, address=self.address)
                    failures = 0
                    async for message in call:
                        self._dispatch(frames.decode_step(message.payload))
                    reason = "the worker ended it"
                except grpc.aio.AioRpcError as e:
                    reason = f"{e.code().name}: {e.details()}"
                except (ValueError, TypeError, KeyError) as e:
                    reason = f"a frame could not be read: {e}"
                finally:
                    call.cancel()
                    writer.cancel()
                    self._lose()
                log.warning("stream lost", node=self.node, reason=reason)
                await self._clock.sleep(_REST_S[min(failures, len(_REST_S) - 1)])
                failures += 1

    def _dispatch(self, step: frames.StepFrame) -> None:
        flights = self.flights
        for events in (step.accepted, step.outputs, step.failed):
            for event in events:
                flight = flights.get(event.request_id)
                if flight is None:
                    continue  # cancelled a moment ago
                flight.deliver(event)
                if flight.ended:
                    del flights[event.request_id]

    def _lose(self) -> None:
        if self._up.is_set():
            metrics.STREAMS.dec()
        self._up.clear()
        flights, self.flights = self.flights, {}
        for flight in flights.values():
            flight.deliver(WorkerLost(self.node))


async def _write(call: Any, outbox: asyncio.Queue[bytes]) -> None:
    # The reading side sees the same end of the stream, and says why.
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        while True:
            # What waits together travels together.
            commands = [await outbox.get()]
            while len(commands) < frames.MOST_COMMANDS and not outbox.empty():
                commands.append(outbox.get_nowait())
            await call.write(worker_pb2.Frame(payload=frames.together(commands)))


class Workers:
    """All worker streams, by node. Streams of nodes that the fleet no longer names end once they are empty."""

    def __init__(self, tasks: Tasks, clock: Clock) -> None:
        self._tasks, self._clock = tasks, clock
        self._streams: dict[str, tuple[WorkerStream, asyncio.Task[None]]] = {}

    def stream(self, node: str, address: str) -> WorkerStream:
        """The stream to `node`, begun if need be; a node that moved gets a new one."""
        known = self._streams.get(node)
        if known and known[0].address == address:
            return known[0]
        if known:
            known[1].cancel()
        stream = WorkerStream(node, address, self._clock)
        self._streams[node] = (stream, self._tasks.start(stream.run(), f"stream to {node}"))
        return stream

    def follow(self, addresses: dict[str, str]) -> None:
        """Keep streams to these nodes and no others."""
        for node, address in addresses.items():
            self.stream(node, address)
        for node in [n for n in self._streams if n not in addresses]:
            stream, task = self._streams[node]
            if not stream.flights:
                task.cancel()
                del self._streams[node]

    @property
    def connected(self) -> set[str]:
        """Nodes to which a stream stands."""
        return {node for node, (stream, _) in self._streams.items() if stream.connected}

    @property
    def in_flight(self) -> dict[str, int]:
        """This gateway's requests per node."""
        return {node: len(stream.flights) for node, (stream, _) in self._streams.items()}

    def flights_on(self, node: str) -> int | None:
        """This gateway's requests on a node; None when no stream to it stands."""
        known = self._streams.get(node)
        return len(known[0].flights) if known is not None and known[0].connected else None

    async def stop(self) -> None:
        """End all streams."""
        for _, task in self._streams.values():
            task.cancel()
        for _, task in self._streams.values():
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._streams.clear()
