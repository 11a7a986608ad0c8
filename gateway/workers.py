"""The streams to the workers: one per worker, kept up while the fleet names it.

Requests are sent as commands (`core.outbox`); every engine step returns one frame, which is split into the queues of
its requests (a `Flight` each). Requests for an engine with HTTP of its own (an `HttpFlight` each) share a call beside
the stream (`http_calls`), which lives no longer than the stream. When a stream ends, each of its flights gets a
`WorkerLost` with a verdict (`core.quarantine`); `generate` or `relay` decides about a retry. A worker that loses its
stream cancels the stream's requests. The flights of a hung worker are given up (`core.overdue`); it reads their
cancellation when it continues.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import grpc

from contracts import frames, identity
from contracts.devices import node_of
from contracts.errors import Unavailable, to_wire
from contracts.request import Failed, GenerateRequest
from contracts.v1 import worker_pb2, worker_pb2_grpc
from gateway import metrics
from gateway.backend import Backend, Question
from gateway.core.outbox import Outbox
from gateway.core.overdue import Waits, abandoned
from gateway.core.quarantine import judge
from gateway.core.retry import RetryLimits
from gateway.core.routing import FleetView
from gateway.flights import Carried, Flight, Late, WorkerLost
from gateway.http_calls import HttpCall
from gateway.http_flights import HttpFlight
from runtime import rpc, telemetry
from runtime.clock import Clock
from runtime.service import Tasks

log = telemetry.logger("gateway.workers")
_REST_S = (0.1, 0.2, 0.5, 1.0)
#: Seconds between checks for requests that wait for too long.
_LOOK_S = 0.5


class WorkerStream:
    """The stream to one worker, and the call beside it: the `Backend` of both wires."""

    def __init__(self, node: str, address: str, clock: Clock) -> None:
        self.node, self.address, self._clock = node, address, clock
        self.flights: dict[str, Carried] = {}
        #: When the worker last sent anything, on the clock.
        self.heard_s = clock.now()
        self._up = asyncio.Event()
        self._outbox, self._some = Outbox(), asyncio.Event()
        #: For calls beside the stream; None before `run`.
        self._stub: Any = None
        self._http: HttpCall | None = None
        #: The request on trial, as the worker last said; whether the worker has said that it leaves.
        self._trial, self._leaving = "", False

    @property
    def connected(self) -> bool:
        """Whether the connection is up."""
        return self._up.is_set()

    async def submit(self, request: GenerateRequest, connect_s: float, *, pinned: bool = False) -> Flight | WorkerLost:
        """Start `request` on the worker; WorkerLost when there is no connection within `connect_s` seconds. pinned: no
        other node may run it."""
        if not await self._reached(connect_s):
            return WorkerLost(self.node)
        flight = Flight(self, request, self._clock.now(), pinned=pinned)
        self._carry(flight)
        self._outbox.submit(request)
        self._some.set()
        return flight

    async def call_http(
        self, head: worker_pb2.HttpRequest, body: bytes, connect_s: float, *, timed: bool, pinned: bool = False
    ) -> HttpFlight | WorkerLost:
        """Like `submit`, for an engine with HTTP of its own. timed: see `HttpFlight`."""
        if not await self._reached(connect_s):
            return WorkerLost(self.node)
        if self._http is None or self._http.ended:
            self._http = HttpCall(self, self._stub, self._clock)
        flight = self._http.begin(head, body, timed=timed, pinned=pinned)
        self._carry(flight)
        return flight

    async def _reached(self, connect_s: float) -> bool:
        """Whether there is a connection within `connect_s` seconds."""
        if not self.connected:
            try:
                async with asyncio.timeout(connect_s):
                    await self._up.wait()
            except TimeoutError:
                return False
        return True

    def _carry(self, flight: Carried) -> None:
        if self.flights:
            flight.shared = True
            if len(self.flights) == 1:  # else they are marked already
                next(iter(self.flights.values())).shared = True
        self.flights[flight.request_id] = flight

    async def ask(self, question: Question, timeout_s: float) -> Any:
        """The worker's reply; timeout_s 0: no limit. Raises Unavailable when it cannot be reached or does not answer in
        time."""
        if not self.connected:
            raise Unavailable(f"{self.node} cannot be reached; try again")
        try:
            return await getattr(self._stub, question.method)(question.message, timeout=timeout_s or None)
        except grpc.aio.AioRpcError as e:
            if e.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise Unavailable(f"{self.node} did not answer within {timeout_s:g} s; try again") from None
            log.warning(
                "a call was lost", node=self.node, method=question.method, reason=f"{e.code().name}: {e.details()}"
            )
            raise Unavailable(f"{self.node} was lost; try again") from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise Unavailable(f"{self.node} has left; try again") from None  # its channel was closed

    def drop(self, flight: Carried) -> None:
        """Forget a flight and cancel it in the worker."""
        if self.flights.pop(flight.request_id, None) is not None:
            flight.stop()

    def withdraw(self, request_id: str) -> None:
        """Tell the worker to cancel a request whose answer comes as frames."""
        self._outbox.cancel(request_id)
        self._some.set()

    def forget(self, flight: Carried) -> None:
        """The flight has ended."""
        self.flights.pop(flight.request_id, None)

    def hear(self) -> None:
        """The worker has sent something."""
        self.heard_s = self._clock.now()

    def lost(self, flight: Carried) -> WorkerLost:
        """The flight's call broke off. Forgets the flight."""
        self.forget(flight)
        verdict = judge({flight.request_id: flight.sent}, "", leaving=self._leaving)[flight.request_id]
        return WorkerLost(self.node, verdict, only=not flight.shared)

    def give_up(self, flights: Sequence[Carried], *, silent: bool) -> None:
        """Treat these flights of a hung worker as lost, and cancel them there in case it continues. silent: see
        `judge`."""
        verdicts = judge(
            {flight.request_id: flight.sent for flight in flights}, self._on_trial(self.flights), silent=silent
        )
        now = self._clock.now()
        for flight in flights:
            self.drop(flight)
            flight.deliver(WorkerLost(self.node, verdicts[flight.request_id], hung=True), now)

    def let_go(self, waits: Waits) -> None:
        """End the flights that have waited for too long."""
        now = self._clock.now()
        for flight in list(self.flights.values()):
            why = flight.late(waits, now)
            if why:
                self.drop(flight)
                flight.deliver(Late(self.node, f"{self.node}: {why}"), now)

    async def run(self) -> None:
        """Keep the connection up, for ever."""
        failures = 0
        async with rpc.channel(self.address, identity.node(node_of(self.node))) as channel:
            stub: Any = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
            self._stub = stub
            while True:
                self._outbox, self._some, self._trial, self._leaving = Outbox(), asyncio.Event(), "", False
                call = stub.Stream(wait_for_ready=True)
                writer = asyncio.create_task(self._write(call, self._outbox, self._some))
                try:
                    await call.wait_for_connection()
                    self._up.set()
                    self.heard_s = self._clock.now()
                    metrics.STREAMS.inc()
                    log.info("stream up", node=self.node, address=self.address)
                    failures = 0
                    async for message in call:
                        self._heard(message.payload)
                    reason = "the worker ended it"
                except grpc.aio.AioRpcError as e:
                    reason = f"{e.code().name}: {e.details()}"
                finally:
                    call.cancel()
                    writer.cancel()
                    self._lose()
                log.warning("stream lost", node=self.node, reason=reason)
                await self._clock.sleep(_REST_S[min(failures, len(_REST_S) - 1)])
                failures += 1

    def _heard(self, payload: bytes) -> None:
        now = self.heard_s = self._clock.now()
        try:
            step = frames.decode_step(payload)
        except ValueError as e:
            log.error("a frame of no use", node=self.node, error=str(e))
            return
        if step.trial is not None:
            self._trial = step.trial
        self._leaving = self._leaving or step.leaving
        flights = self.flights
        for events in (step.accepted, step.outputs, step.failed):
            for event in events:
                flight = flights.get(event.request_id)
                if flight is None:
                    continue  # just cancelled
                flight.deliver(event, now)
                if flight.ended:
                    del flights[event.request_id]

    def _lose(self) -> None:
        if self._up.is_set():
            metrics.STREAMS.dec()
        self._up.clear()
        flights, self.flights = self.flights, {}
        verdicts = judge(
            {flight.request_id: flight.sent for flight in flights.values()},
            self._on_trial(flights),
            leaving=self._leaving,
        )
        now = self._clock.now()
        for flight in flights.values():
            flight.deliver(WorkerLost(self.node, verdicts[flight.request_id], only=not flight.shared), now)
        if self._http is not None:
            self._http.close("the stream was lost")

    def _on_trial(self, flights: Mapping[str, Carried]) -> str:
        """The request on trial, or empty. A request with a token has passed its trial, whether or not the worker has
        said so."""
        flight = flights.get(self._trial)
        return "" if flight is not None and flight.spoken else self._trial

    async def _write(self, call: Any, outbox: Outbox, some: asyncio.Event) -> None:
        # The reader sees the stream's end too, and logs the reason.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await some.wait()
                message = outbox.next()
                if not outbox:
                    some.clear()
                for request_id, error in message.refused:
                    if (flight := self.flights.pop(request_id, None)) is not None:
                        flight.deliver(Failed(request_id, to_wire(error)), self._clock.now())
                for request_id in message.sent:
                    if (flight := self.flights.get(request_id)) is not None:
                        flight.sent = True
                if message.commands:
                    await call.write(worker_pb2.Frame(payload=frames.together(message.commands)))


class Workers:
    """All worker streams, by node. The stream of a node that has left the fleet ends once it has no flights."""

    def __init__(self, tasks: Tasks, clock: Clock, retry_limits: RetryLimits) -> None:
        self._tasks, self._clock, self._retry_limits = tasks, clock, retry_limits
        self._streams: dict[str, tuple[Backend, asyncio.Task[None]]] = {}
        self._fleet = FleetView()
        #: Since when the fleet reports a node as stalled.
        self._stalled_s: dict[str, float] = {}

    def stream(self, node: str, address: str) -> Backend:
        """The stream to `node`, started if needed; a node with a new address gets a new stream."""
        known = self._streams.get(node)
        if known and known[0].address == address:
            return known[0]
        if known:
            known[1].cancel()
        stream = WorkerStream(node, address, self._clock)
        self._streams[node] = (stream, self._tasks.start(stream.run(), f"stream to {node}"))
        return stream

    def follow(self, fleet: FleetView) -> None:
        """Keep streams to these nodes and no others."""
        self._fleet, now = fleet, self._clock.now()
        self._stalled_s = {n.name: self._stalled_s.get(n.name, now) for n in fleet.nodes if n.stalled}
        addresses = {n.name: n.worker_address for n in fleet.nodes if n.worker_address}
        for node, address in addresses.items():
            self.stream(node, address)
        for node in [n for n in self._streams if n not in addresses]:
            stream, task = self._streams[node]
            if not stream.flights:
                task.cancel()
                del self._streams[node]

    async def watch(self) -> None:
        """End flights that wait for too long, for ever."""
        waits = Waits(self._retry_limits.accept_s, self._retry_limits.first_token_s)
        while True:
            await self._clock.sleep(_LOOK_S)
            now = self._clock.now()
            for node, (stream, _) in list(self._streams.items()):
                if not stream.flights:
                    continue
                stream.let_go(waits)
                others, stalled_s = self._others(node), self._stalled_s.get(node)
                waited = [
                    flight
                    for flight in stream.flights.values()
                    if abandoned(
                        now, stalled_s, stream.heard_s, self._retry_limits.total_s, others=others and not flight.pinned
                    )
                ]
                if waited:
                    known = self._fleet.node(node)
                    log.warning("worker given up", node=node, why=known and known.stalled, requests=len(waited))
                    stream.give_up(waited, silent=known is None or known.stalled != "engine")

    def _others(self, name: str) -> bool:
        """Whether another reachable node serves what this one serves."""
        node, connected = self._fleet.node(name), self.connected
        models = node.models if node is not None else frozenset()
        return any(
            n.name != name and n.serving and not n.stalled and n.name in connected and (not models or n.models & models)
            for n in self._fleet.nodes
        )

    @property
    def connected(self) -> set[str]:
        """Nodes whose stream is up."""
        return {node for node, (stream, _) in self._streams.items() if stream.connected}

    @property
    def in_flight(self) -> dict[str, int]:
        """This gateway's requests per node."""
        return {node: len(stream.flights) for node, (stream, _) in self._streams.items()}

    def flights_on(self, node: str) -> int | None:
        """This gateway's requests on a node; None when its stream is down."""
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
