"""The fleet as a scheduler last described it, and the placement of requests.

When no scheduler answers, the gateway routes directly over the last known fleet (`core.routing`), preferably to the
node that served the session last, so that sessions keep their caches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc

from contracts.context import ContextBound
from contracts.convert import session_from_wire, session_to_wire
from contracts.devices import is_of
from contracts.errors import Unavailable
from contracts.ids import SessionKey
from contracts.models import ModelState, ModelWire, state_of, wire_of
from contracts.v1 import scheduler_pb2 as pb
from contracts.workflow import Hop
from gateway import metrics
from gateway.core import registry
from gateway.core.retry import RetryLimits
from gateway.core.route_hints import RouteHints
from gateway.core.routing import FleetView, LastNodes, Model, ModelThere, NodeView, Route, direct_route, following
from gateway.schedulers import Scheduler, Schedulers, workflow_key
from gateway.workers import Workers
from runtime import telemetry
from runtime.clock import Clock
from runtime.config import Config
from runtime.registry import adapters_of, registered
from runtime.same_secret import Membership

log = telemetry.logger("gateway.fleet")
#: Timeout of calls other than placement: sessions, workflows.
CALL_TIMEOUT_S = 5.0
#: Sessions of a list that are converted before other requests run.
AT_A_TIME = 64
_REST_S = 0.3
_SILENT = "the scheduler does not answer at the moment; try again"


class Fleet:
    """The last known fleet, and the schedulers."""

    def __init__(self, config: Config, workers: Workers, clock: Clock, retry_limits: RetryLimits) -> None:
        self._config, self._workers, self._clock, self._retry_limits = config, workers, clock, retry_limits
        self.schedulers = Schedulers(config.scheduler_addresses, clock, retry_limits.scheduler_rest_s)
        #: None until a scheduler has answered for the first time.
        self.view: FleetView | None = None
        #: A Watch stream is up, so `view` is current.
        self.live = False
        #: Models in the configuration, by name.
        self.registered = {
            name: registry.Registered(m.ttft_s, m.tpot_s, m.engine, m.priority, m.pinned)
            for name, m in registered(config).items()
        }
        #: The model of each LoRA adapter, by their names. Requests for an adapter are placed as its model's.
        self.adapters = adapters_of(config)
        #: Every model seen; a model whose nodes are restarting is still known.
        self.models: dict[str, Model] = {}
        #: By model: how long a prompt may be on the node with the largest limit.
        self.bounds: dict[str, ContextBound] = {}
        #: By model: how requests reach it. relays: some model's engine has HTTP of its own.
        self.wires = registry.wires(self.registered, {})
        self.relays = ModelWire.HTTP in self.wires.values()
        self._last_nodes = LastNodes()
        self._membership = Membership()
        self.route_hints = RouteHints()

    async def stop(self) -> None:
        """Close the channels."""
        await self.schedulers.stop()

    async def watch(self) -> None:
        """Follow the fleet, for ever: watch one scheduler, and the next one when the stream breaks. Raises
        SecretDiffers at the start if the schedulers have another cluster secret."""
        while True:
            for scheduler in self.schedulers.all:
                await self._follow(scheduler)
            await self._clock.sleep(_REST_S)

    async def _follow(self, scheduler: Scheduler) -> None:
        """Watch a scheduler until its stream breaks or, if there are others, until it hangs (a hung scheduler's stream
        stays open)."""
        alone = len(self.schedulers.all) == 1
        scheduler.hangs.clear()
        call = scheduler.stub.Watch(pb.WatchRequest(), wait_for_ready=alone)
        hanging = asyncio.ensure_future(scheduler.hangs.wait())
        try:
            while True:
                reading = asyncio.ensure_future(call.read())
                await asyncio.wait({reading} if alone else {reading, hanging}, return_when=asyncio.FIRST_COMPLETED)
                if not reading.done():
                    reading.cancel()
                    reason = "it does not answer in time"
                    break
                if not isinstance(message := reading.result(), pb.Fleet):
                    reason = "the scheduler ended it"
                    break
                self._membership.let_in()
                self._take(message, scheduler)
        except grpc.aio.AioRpcError as e:
            reason = f"{e.code().name}: {e.details()}"
            self._membership.failed(e, self._clock.now())
        finally:
            hanging.cancel()
            call.cancel()
            was_live, self.live = self.live, False
        if was_live:
            log.warning("the fleet is no longer known", scheduler=scheduler.address, reason=reason)

    def _take(self, message: Any, scheduler: Scheduler) -> None:
        if not self.live:
            log.info(
                "the fleet is known",
                scheduler=scheduler.address,
                nodes=len(message.nodes),
                expected=message.expected_nodes,
            )
        self.view, self.live = following(self.view, fleet_from_wire(message), message.gathering), True
        scheduler.rests_until_s = 0.0
        for node in message.nodes:
            for m in node.models:
                self.models[m.name] = Model(
                    m.name,
                    m.max_tokens,
                    m.created_s,
                    m.weight_bytes,
                    m.ttft_slo_s,
                    m.tpot_slo_s,
                    m.engine,
                    wire_of(m.wire),
                    m.shape.layers,
                )
        if not message.gathering and sum(node.serving for node in message.nodes) >= message.expected_nodes:
            there = {m.name for node in message.nodes for m in node.models}  # the others were removed
            self.models = {
                name: model for name, model in self.models.items() if name in self.registered or name in there
            }
        self.wires = registry.wires(self.registered, self.models)
        self.relays = ModelWire.HTTP in self.wires.values()
        self.bounds |= bounds_of(m for node in message.nodes for m in node.models)
        self.bounds |= {name: self.bounds[base] for name, base in self.adapters.items() if base in self.bounds}
        self._workers.follow(self.view)

    def targets(self, name: str) -> dict[str, float]:
        """The model's targets in seconds; 0: none."""
        return registry.targets(name, self.registered, self.models)

    # ---- what is known -----------------------------------------------------------------------------------------
    def knows_model(self, name: str) -> bool:
        """Whether the configuration registers the model or adapter, or some node has had it."""
        return name in self.registered or name in self.adapters or name in self.models

    def base_of(self, name: str) -> str:
        """The model that an adapter changes; other names are their own."""
        return self.adapters.get(name, name)

    def described(self) -> list[dict[str, Any]]:
        """Every known model, as `GET /v1/models` shows it."""
        names = registry.names(self.registered, self.models)
        found = {name: registry.described(name, self.registered, self.models, self.view) for name in names}
        return [*found.values(), *(registry.adapter(name, found[base]) for name, base in self.adapters.items())]

    def knows_node(self, name: str) -> bool:
        """Whether the fleet or the configuration has a node or a device of this name."""
        seen = self.view is not None and any(is_of(name, node.name) for node in self.view.nodes)
        return seen or any(
            is_of(name, d.name) for n in range(self._config.nodes.count) for d in self._config.node(n).devices
        )

    def lacks(self, name: str, model: str) -> bool:
        """Whether the named node or device serves other models only, as far as is known."""
        return self.view is not None and self.view.lacks(name, model)

    # ---- placement ---------------------------------------------------------------------------------------------
    async def place(
        self,
        request_id: str,
        session: SessionKey,
        model: str,
        *,
        priority: int,
        pin: str,
        avoid: list[str],
        hop: Hop | None = None,
        trace: str = "",
    ) -> Route:
        """The route of this attempt: by route hint, scheduler, stand-in scheduler, or directly. Raises Unavailable when
        no node can take it now, other RequestErrors for the caller's mistakes."""
        if not pin and not avoid and hop is None and len(self.route_hints):
            hinted = self.route_hints.take(session, model, self.view, self._workers, self._clock.now())
            if hinted is not None:
                metrics.child(metrics.PLACED, "hint").inc()
                return hinted
        wanted = pb.PlaceRequest(
            request_id=request_id,
            session=session_to_wire(session),
            model=model,
            priority=priority,
            pin_node=pin,
            avoid_nodes=avoid,
            hop=pb.Hop(workflow=hop.workflow, agent=hop.agent, run=hop.run, ended=hop.ended) if hop else None,
            trace=trace,
        )
        key = workflow_key(session.tenant, hop.workflow) if hop is not None and hop.workflow else session
        own = self.schedulers.order(key)[0]
        for scheduler in self.schedulers.of(key):
            placed = await self.schedulers.place(scheduler, wanted, self._retry_limits.scheduler_s)
            if placed is not None:
                metrics.child(metrics.PLACED, "scheduler" if scheduler is own else "standby").inc()
                return _route(placed, placed.why, decided_by=scheduler.address)
        return self._direct(session, model, pin, avoid)

    def taken(
        self, request_id: str, session: SessionKey, model: str, priority: int, node: str, trace: str = ""
    ) -> None:
        """A turn used its route hint: tell the scheduler, which then counts the turn on `node`."""
        wire = session_to_wire(session)
        told = pb.PlaceRequest(
            request_id=request_id, session=wire, model=model, priority=priority, pin_node=node, taken=True, trace=trace
        )
        for scheduler in self.schedulers.of(session)[:1]:
            scheduler.placing.tell(told)

    def note_route_hint(self, session: SessionKey, placed: pb.Placement) -> None:
        """Remember the placement with which a scheduler answered the session's hint."""
        route = _route(placed, "its hint's node", from_hint=True) if placed.node else None
        self.route_hints.note(session, route, self._clock.now())

    def served(self, session: SessionKey, node: str) -> None:
        """A node has accepted a request of the session."""
        self._last_nodes.note(session, node)

    def _direct(self, session: SessionKey, model: str, pin: str, avoid: list[str]) -> Route:
        workers, last = self._workers, self._last_nodes.get(session)
        route = direct_route(
            self.view or FleetView(), model, workers.in_flight, workers.connected, pin=pin, avoid=avoid, last=last
        )
        if route is None:
            raise Unavailable("neither the scheduler nor a node can take this request at the moment")
        metrics.PLACED.labels("direct").inc()
        return route

    # ---- other calls -------------------------------------------------------------------------------------------
    async def call(
        self, method: str, message: Any, timeout_s: float = CALL_TIMEOUT_S, session: SessionKey | None = None
    ) -> Any:
        """The answer of the session's scheduler, or of the next one that answers. Raises RequestError; Unavailable when
        none answers."""
        answer = await self.schedulers.ask(method, message, session, timeout_s)
        if answer is None:
            raise Unavailable(_SILENT)
        return answer

    async def call_all(self, method: str, message: Any, session: SessionKey | None = None) -> list[Any]:
        """Like `call`, but to all schedulers: at least one answer, in the session's order of schedulers."""
        answers = await self.schedulers.ask_all(method, message, session, CALL_TIMEOUT_S)
        if not answers:
            raise Unavailable(_SILENT)
        return answers

    async def finetune(self, method: str, message: Any) -> Any:
        """The answer of the first scheduler, which has all fine-tuning jobs. Raises RequestError; Unavailable when it
        does not answer."""
        answer = await self.schedulers.tell(self.schedulers.all[0], method, message, CALL_TIMEOUT_S)
        if answer is None:
            raise Unavailable(_SILENT)
        return answer

    async def sessions(self, wanted: pb.ListSessionsRequest) -> tuple[list[pb.SessionSummary], bool] | None:
        """A page of the sessions that the schedulers know, and whether there are more. Each entry comes from the
        session's scheduler, which knows its hint. None: no scheduler knows `wanted.after`, and the order needs it."""
        told = self.schedulers.of(None)
        answers = await asyncio.gather(*(self.schedulers.tell(s, "ListSessions", wanted, CALL_TIMEOUT_S) for s in told))
        heard = {s.address: reply for s, reply in zip(told, answers, strict=True) if reply is not None}
        if not heard:
            raise Unavailable(_SILENT)
        if all(reply.unknown_after for reply in heard.values()):
            return None
        found: dict[SessionKey, pb.SessionSummary] = {}
        for address, reply in heard.items():
            for number, summary in enumerate(reply.sessions):
                if number % AT_A_TIME == AT_A_TIME - 1:
                    await asyncio.sleep(0)
                key = session_from_wire(summary.session)
                if key not in found or self._owner(key, heard) == address:
                    found[key] = summary
        page = sorted(found.values(), key=lambda s: (0.0 if wanted.by_id else -s.last_use_s, s.session.session_id))
        return page[: wanted.limit], len(page) > wanted.limit or any(reply.more for reply in heard.values())

    def _owner(self, session: SessionKey, heard: dict[str, Any]) -> str:
        return next((s.address for s in self.schedulers.of(session) if s.address in heard), "")


def _route(placed: pb.Placement, why: str, from_hint: bool = False, decided_by: str = "") -> Route:
    return Route(
        placed.node,
        placed.worker_address,
        tuple(placed.source_nodes),
        why,
        from_hint,
        placed.kept_tokens,
        decided_by,
        placed.hint_trace,
    )


def fleet_from_wire(message: Any) -> FleetView:
    """The domain value of a `Fleet` message."""
    return FleetView(tuple(_node(n) for n in message.nodes), message.expected_nodes)


def bounds_of(models: Iterable[Any]) -> dict[str, ContextBound]:
    """By model: the largest bound of the nodes that have it. A figure that some node does not report is 0 (unknown)."""
    told: dict[str, list[tuple[int, int, int]]] = {}
    for m in models:
        told.setdefault(m.name, []).append((m.max_tokens, m.longest_token_bytes, m.message_token_bytes))
    return {
        name: ContextBound(*(max(told) if all(told) else 0 for told in zip(*of, strict=True)))
        for name, of in told.items()
    }


def _node(n: Any) -> NodeView:
    counters = (
        "outstanding_tokens",
        "advised",
        "hbm_pages_total",
        "hbm_pages_free",
        "hbm_pages_cached",
        "dram_bytes_total",
        "dram_bytes_used",
    )
    there = tuple(_there(m, n.loads) for m in n.models)
    return NodeView(
        name=n.node,
        worker_address=n.worker_address,
        serving=n.serving,
        models=frozenset(m.model for m in there if m.state is ModelState.ACTIVE),
        running=n.running,
        waiting=n.waiting,
        state=n.state,
        stalled=n.stalled,
        there=there,
        details={"store_address": n.store_address}
        | {
            name: getattr(n, name)
            for name in (*counters, "ssd_bytes_used", "sessions", "device_bytes", "device_bytes_free")
        }
        | {"models": [_model(m) | _now(there[i]) for i, m in enumerate(n.models)], "memory": _memory(n.memory)},
    )


def _there(m: Any, loads: Iterable[Any]) -> ModelThere:
    load = next((load for load in loads if load.model == m.name), None)
    if load is None:
        return ModelThere(m.name, state_of(m.state))
    same = ("kv_bytes_used", "kv_bytes_cached", "kv_bytes_limit", "layers_lent", "idle_s", "activation_s")
    return ModelThere(
        m.name, state_of(load.state), load.running, load.waiting, **{name: getattr(load, name) for name in same}
    )


def _now(there: ModelThere) -> dict[str, Any]:
    same = ("running", "waiting", "kv_bytes_used", "kv_bytes_cached", "layers_lent", "idle_s", "activation_s")
    return {"state": there.state.word} | {name: getattr(there, name) for name in same}


def _memory(shares: Iterable[Any]) -> list[dict[str, Any]]:
    """Who holds a device's memory, the largest first within a use; what is nobody's last."""
    order = ("weights", "kv", "trainer", "engine", "warm", "free")
    by_use = sorted(shares, key=lambda m: (order.index(m.use) if m.use in order else len(order), -m.bytes, m.name))
    return [{"use": m.use, "name": m.name, "bytes": m.bytes} for m in by_use]


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
        "weight_bytes": m.weight_bytes,
    }
