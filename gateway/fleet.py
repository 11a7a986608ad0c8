"""The scheduler as the gateway knows it: the fleet it last described, and where it wants a request.

When it does not answer within about a second, requests go on: the gateway routes directly over the last known fleet
(`core.routing`) and does not ask again for a moment, so that a hung scheduler costs one request a second and not all.
"""

from __future__ import annotations

from typing import Any

import grpc

from contracts.convert import session_to_wire
from contracts.errors import RequestError, Unavailable
from contracts.ids import SessionKey
from contracts.v1 import scheduler_pb2 as pb
from contracts.v1 import scheduler_pb2_grpc
from contracts.workflow import Hop
from gateway import metrics
from gateway.core.refusals import refusal
from gateway.core.retry import Patience
from gateway.core.routing import FleetView, Model, Node, Route, direct_route
from gateway.workers import Workers
from runtime import rpc, telemetry
from runtime.clock import Clock
from runtime.config import Config

log = telemetry.logger("gateway.fleet")
#: For the calls that callers wait for but that place nothing: sessions, erasure.
CALL_TIMEOUT_S = 5.0
_REST_S = 0.3


class Fleet:
    """The last known fleet, and the scheduler's stub."""

    def __init__(self, config: Config, workers: Workers, clock: Clock, patience: Patience) -> None:
        self._config, self._workers, self._clock, self._patience = config, workers, clock, patience
        self._channel = rpc.channel(config.scheduler_address)
        self.scheduler: Any = scheduler_pb2_grpc.SchedulerStub(self._channel)  # type: ignore[no-untyped-call]
        #: None until a scheduler has answered for the first time.
        self.view: FleetView | None = None
        #: A Watch stream stands, so `view` is as of now.
        self.live = False
        #: Every model seen; a model whose nodes are restarting is still known.
        self.models: dict[str, Model] = {}
        self._silent_until_s = 0.0

    async def stop(self) -> None:
        """Close the channel."""
        await self._channel.close(None)

    async def watch(self) -> None:
        """Follow the fleet, for ever."""
        while True:
            call = self.scheduler.Watch(pb.WatchRequest(), wait_for_ready=True)
            try:
                async for message in call:
                    self._take(message)
                reason = "the scheduler ended it"
            except grpc.aio.AioRpcError as e:
                reason = f"{e.code().name}: {e.details()}"
            finally:
                call.cancel()
                self.live = False
            log.warning("the fleet is no longer known", reason=reason)
            await self._clock.sleep(_REST_S)

    def _take(self, message: Any) -> None:
        if not self.live:
            log.info("the fleet is known", nodes=len(message.nodes), expected=message.expected_nodes)
        self.view, self.live = fleet_from_wire(message), True
        self._silent_until_s = 0.0
        for node in message.nodes:
            for m in node.models:
                self.models[m.name] = Model(m.name, m.max_tokens, m.created_s)
        self._workers.follow({n.name: n.worker_address for n in self.view.nodes if n.worker_address})

    # ---- what is known -----------------------------------------------------------------------------------------
    def knows_model(self, name: str) -> bool:
        """Some node has served it, or the configuration names it."""
        return name in self.models or name == self._config.served_model

    def knows_node(self, name: str) -> bool:
        """The fleet or the configuration names it."""
        seen = self.view is not None and self.view.node(name) is not None
        return seen or name in {self._config.node(i).name for i in range(self._config.nodes.count)}

    # ---- placement ---------------------------------------------------------------------------------------------
    async def place(
        self, request_id: str, session: SessionKey, model: str, *, priority: int, pin: str, avoid: list[str], hop: Hop | None = None
    ) -> Route:
        """Where this attempt goes. Raises a RequestError: Unavailable when no node can take it now, else the caller's fault."""
        if self._clock.now() >= self._silent_until_s:
            wanted = pb.PlaceRequest(
                request_id=request_id,
                session=session_to_wire(session),
                model=model,
                priority=priority,
                pin_node=pin,
                avoid_nodes=avoid,
                hop=pb.Hop(workflow=hop.workflow, agent=hop.agent, run=hop.run, ended=hop.ended) if hop else None,
            )
            try:
                placed = await self.scheduler.Place(wanted, timeout=self._patience.scheduler_s)
                metrics.PLACED.labels("scheduler").inc()
                return Route(placed.node, placed.worker_address, tuple(placed.source_nodes), placed.why)
            except grpc.aio.AioRpcError as e:
                refused = refusal(e.details() or "")
                if refused is not None:
                    raise refused from None
                log.warning("no placement by the scheduler", code=e.code().name, details=e.details())
                if e.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    self._silent_until_s = self._clock.now() + self._patience.scheduler_rest_s
        return self._direct(model, pin, avoid)

    def _direct(self, model: str, pin: str, avoid: list[str]) -> Route:
        workers = self._workers
        route = direct_route(self.view or FleetView(), model, workers.in_flight, workers.connected, pin=pin, avoid=avoid)
        if route is None:
            raise Unavailable("neither the scheduler nor a node can take this request at the moment")
        metrics.PLACED.labels("direct").inc()
        return route

    async def call(self, method: str, message: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """A scheduler call that a caller waits for. Raises RequestError; Unavailable when the scheduler does not answer."""
        try:
            return await getattr(self.scheduler, method)(message, timeout=timeout_s)
        except grpc.aio.AioRpcError as e:
            error: RequestError = refusal(e.details() or "") or Unavailable("the scheduler does not answer at the moment; try again")
            raise error from None


def fleet_from_wire(message: Any) -> FleetView:
    """The domain value of a `Fleet` message."""
    return FleetView(tuple(_node(n) for n in message.nodes), message.expected_nodes)


def _node(n: Any) -> Node:
    counters = ("outstanding_tokens", "advised", "hbm_pages_total", "hbm_pages_free", "dram_bytes_total", "dram_bytes_used")
    return Node(
        name=n.node,
        worker_address=n.worker_address,
        serving=n.serving,
        models=frozenset(m.name for m in n.models),
        running=n.running,
        waiting=n.waiting,
        details={"store_address": n.store_address}
        | {name: getattr(n, name) for name in (*counters, "ssd_bytes_used", "sessions")}
        | {"models": [_model(m) for m in n.models]},
    )


def _model(m: Any) -> dict[str, Any]:
    shape = m.shape
    return {
        "name": m.name,
        "max_tokens": m.max_tokens,
        "created_s": m.created_s,
        "fingerprint": shape.fingerprint.hex(),
        "layers": shape.layers,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "chunk_tokens": shape.chunk_tokens,
        "dtype": shape.dtype,
    }
