"""The scheduler's gRPC shell: turns calls and reports into events of the core, and decisions into commands to nodes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc

from contracts.convert import advisory_from_wire, session_from_wire, session_to_wire, shape_from_wire, shape_to_wire
from contracts.errors import RequestError, to_wire
from contracts.ids import SessionKey
from contracts.v1 import common_pb2, kvstore_pb2, kvstore_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from runtime import rpc, telemetry
from runtime.clock import Clock, RealClock
from runtime.config import Config
from runtime.service import Tasks
from scheduler.core import snapshot
from scheduler.core.advisories import Advisories, Pending
from scheduler.core.directory import Directory, Held
from scheduler.core.erasures import Erasure, Erasures, Word
from scheduler.core.fleet import Fleet, Load, Model, Node
from scheduler.core.placement import Choice, place

log = telemetry.logger("scheduler")
_STATUS = {400: grpc.StatusCode.INVALID_ARGUMENT, 404: grpc.StatusCode.NOT_FOUND, 503: grpc.StatusCode.UNAVAILABLE}
#: How often watchers hear of changes at most, in seconds.
WATCH_EVERY_S = 0.1
RESIDENCY_TIMEOUT_S = 1.5
#: How long an erasure waits for every node to confirm.
ERASE_S = 10.0


class SchedulerService(scheduler_pb2_grpc.SchedulerServicer):
    """One scheduler process. All state is soft and lives in the three cores."""

    def __init__(self, config: Config, tasks: Tasks, clock: Clock | None = None) -> None:
        self.config, self.tasks, self.clock = config, tasks, clock or RealClock()
        self.fleet, self.directory, self.advisories = Fleet(), Directory(), Advisories()
        self.erasures = Erasures()
        self._erasure_heard = asyncio.Condition()
        self._stores: dict[str, asyncio.Queue[scheduler_pb2.StoreCommand]] = {}
        self._workers: dict[str, str] = {}
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._server: grpc.aio.Server | None = None

    # ---- life --------------------------------------------------------------------------------------------------
    async def start(self) -> None:
        """Listen."""
        self._server, health = rpc.server(self.config.scheduler_address, ["upbeat.v1.Scheduler"])
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        await self._server.start()
        await rpc.set_serving(health, True)
        self.tasks.start(self._expire(), "expire")
        log.info("serving", address=self.config.scheduler_address)

    async def drain(self) -> None:
        """Nothing here outlives a call."""

    async def stop(self) -> None:
        """Stop listening."""
        await self.tasks.cancel()
        for channel in self._channels.values():
            await channel.close(None)
        if self._server:
            await self._server.stop(0.2)

    async def _expire(self) -> None:
        while True:
            await self.clock.sleep(1.0)
            self.advisories.expire(self.clock.now())

    # ---- placement ---------------------------------------------------------------------------------------------
    def _choose(self, key: SessionKey, turn: snapshot.Turn) -> Choice:
        view = snapshot.take(self.fleet, self.directory, self.advisories, key, self.clock.now())
        return place(view, turn, self.config.scheduler.policy, str(key).encode())

    def _sources(self, key: SessionKey, node: str) -> list[str]:
        session = self.directory.get(key)
        return session.sources(without=node) if session else []

    async def Place(self, request: scheduler_pb2.PlaceRequest, context: Any) -> scheduler_pb2.Placement:
        """See the proto."""
        key, now = session_from_wire(request.session), self.clock.now()
        avoid = frozenset(request.avoid_nodes)
        pending = self.advisories.use(key)
        try:
            prefetched = pending.node if pending else ""
            choice = self._choose(key, snapshot.Turn(request.model, prefetched=prefetched, pin=request.pin_node, avoid=avoid))
        except RequestError as e:
            await _refuse(context, e)
            raise
        self.fleet.placed(choice.node, request.request_id, now)
        return scheduler_pb2.Placement(
            node=choice.node,
            worker_address=self.fleet.nodes[choice.node].worker_address,
            source_nodes=self._sources(key, choice.node),
            advised=choice.node == prefetched,
            why=choice.why,
        )

    def _can_serve(self, name: str, model: str, avoid: frozenset[str]) -> bool:
        node = self.fleet.nodes.get(name)
        return node is not None and node.serving and name not in avoid and any(m.name == model for m in node.models)

    # ---- hints -------------------------------------------------------------------------------------------------
    async def Advise(self, request: scheduler_pb2.AdviseRequest, context: Any) -> scheduler_pb2.AdviseReply:
        """Place each hint and tell the node's store. A hint nobody can use is dropped without a word."""
        return scheduler_pb2.AdviseReply(nodes=[self._advise(a, i) for i, a in enumerate(request.advisories)])

    def _advise(self, wire: common_pb2.Advisory, place_in_list: int) -> str:
        advisory, key, now = advisory_from_wire(wire), session_from_wire(wire.session), self.clock.now()
        if advisory.ordered and not wire.HasField("expected_arrival_s"):
            wire.expected_arrival_s = place_in_list * 1e-3  # keeps the caller's order and promises nothing else
        session, before = self.directory.get(key), self.advisories.get(key)
        model = advisory.model_id or (session.model if session else "") or self.config.served_model
        try:
            keep = before is not None and not wire.pin_node and self._can_serve(before.node, model, frozenset())
            turn = snapshot.Turn(model, advised=True, pin=before.node if before is not None and keep else wire.pin_node)
            node = self._choose(key, turn).node
        except RequestError as e:
            log.debug("advisory not placed", session=str(key), reason=e.message)
            return ""
        self.advisories.place(Pending(key, wire.advisory_id, advisory, node, now, now + advisory.lifetime_s))
        prefetch = scheduler_pb2.PrefetchCommand(advisory=wire, source_nodes=self._sources(key, node))
        self._command(node, scheduler_pb2.StoreCommand(prefetch=prefetch))
        return node

    async def Invalidate(self, request: scheduler_pb2.InvalidateRequest, context: Any) -> scheduler_pb2.InvalidateReply:
        """See the proto."""
        key = session_from_wire(request.session) if request.session.session_id else None
        pending = self.advisories.invalidate(key, request.session.tenant, request.advisory_id)
        if pending:
            self._command(pending.node, scheduler_pb2.StoreCommand(invalidate=session_to_wire(pending.session)))
        return scheduler_pb2.InvalidateReply(known=pending is not None)

    def _command(self, node: str, command: scheduler_pb2.StoreCommand) -> None:
        queue = self._stores.get(node)
        if queue is not None:
            queue.put_nowait(command)

    # ---- reports -----------------------------------------------------------------------------------------------
    async def WorkerReports(self, request_iterator: AsyncIterator[scheduler_pb2.WorkerReport], context: Any) -> AsyncIterator[Any]:
        """One worker's reports, until its stream ends."""
        name, instance = "", ""
        try:
            async for report in request_iterator:
                now = self.clock.now()
                if report.WhichOneof("kind") == "hello":
                    name, instance = report.hello.node, report.hello.instance
                    self._workers[name] = instance
                    models = tuple(_model(m) for m in report.hello.models)
                    self.fleet.worker_joined(name, report.hello.address, models, now, report.hello.peer_bytes_per_s)
                    log.info("worker joined", node=name, address=report.hello.address)
                elif not name or self._workers.get(name) != instance:
                    continue
                elif report.WhichOneof("kind") == "metrics":
                    self.fleet.node(name).worker_metrics = dict(report.metrics.samples)
                else:
                    r = report.load
                    load = Load(
                        r.running, r.waiting, r.outstanding_tokens, r.outstanding_s, r.request_s, r.hbm_pages_total, r.hbm_pages_free
                    )
                    self.fleet.loaded(name, load, list(r.in_flight), list(r.finished), now)
        finally:
            if name and self._workers.get(name) == instance:
                del self._workers[name]
                self.fleet.worker_left(name)
                self.advisories.forget_node(name)
                log.info("worker left", node=name)
        return
        yield  # an async generator: commands to workers have no content yet beyond ending the stream

    async def StoreReports(
        self, request_iterator: AsyncIterator[scheduler_pb2.StoreReport], context: Any
    ) -> AsyncIterator[scheduler_pb2.StoreCommand]:
        """One store's reports, and the commands to it."""
        commands: asyncio.Queue[scheduler_pb2.StoreCommand] = asyncio.Queue()
        reader = asyncio.ensure_future(self._read_store(request_iterator, commands))
        try:
            while not reader.done():
                waiting = asyncio.ensure_future(commands.get())
                await asyncio.wait([waiting, reader], return_when=asyncio.FIRST_COMPLETED)
                if waiting.done():
                    yield waiting.result()
                else:
                    waiting.cancel()
        finally:
            reader.cancel()
            for name in [n for n, q in self._stores.items() if q is commands]:
                del self._stores[name]
                self.fleet.store_left(name)
                self.directory.forget_node(name)
                log.info("store left", node=name)

    async def _read_store(self, reports: AsyncIterator[scheduler_pb2.StoreReport], commands: asyncio.Queue[Any]) -> None:
        name = ""
        async for report in reports:
            kind = report.WhichOneof("kind")
            if kind == "hello":
                name = report.hello.node
                self.directory.forget_node(name)
                self._stores[name] = commands
                self.fleet.store_joined(name, report.hello.address)
                log.info("store joined", node=name, address=report.hello.address)
                self._tell_peers()
                for session in self.erasures.owed_by(name):
                    self._command(name, scheduler_pb2.StoreCommand(erase=session_to_wire(session)))
            elif not name or self._stores.get(name) is not commands:
                continue
            elif kind == "held":
                if report.held.full:
                    self.directory.forget_node(name)
                for h in report.held.sessions:
                    held = Held(h.tokens_here, h.bytes_here, h.tokens_dram)
                    self.directory.report(name, session_from_wire(h.session), h.model, h.tokens_total, h.last_use_s, held)
            elif kind == "load":
                node = self.fleet.node(name)
                node.dram_bytes_total, node.dram_bytes_used = report.load.dram_bytes_total, report.load.dram_bytes_used
                node.ssd_bytes_used = report.load.ssd_bytes_used
            elif kind == "erased":
                e = report.erased
                word = Word(e.verified, e.known, {left.tier: left.chunks for left in e.left})
                async with self._erasure_heard:
                    self.erasures.heard(name, session_from_wire(e.session), word)
                    self._erasure_heard.notify_all()
            elif kind == "metrics":
                self.fleet.node(name).store_metrics = dict(report.metrics.samples)

    def _tell_peers(self) -> None:
        addresses = {n.name: n.store_address for n in self.fleet.nodes.values() if n.store_here}
        for name in self._stores:
            self._command(name, scheduler_pb2.StoreCommand(peers=scheduler_pb2.FleetPeers(addresses=addresses)))

    # ---- views -------------------------------------------------------------------------------------------------
    async def Watch(self, request: scheduler_pb2.WatchRequest, context: Any) -> AsyncIterator[scheduler_pb2.Fleet]:
        """The fleet now and at each change."""
        seen = -1
        while True:
            if self.fleet.version != seen:
                seen = self.fleet.version
                yield self._fleet()
            await asyncio.sleep(WATCH_EVERY_S)

    async def Metrics(self, request: scheduler_pb2.MetricsRequest, context: Any) -> scheduler_pb2.FleetMetrics:
        """The nodes' own samples, as last reported."""
        nodes = {
            n.name: scheduler_pb2.ProcessMetrics(samples=n.worker_metrics | n.store_metrics)
            for n in self.fleet.nodes.values()
            if n.worker_here or n.store_here
        }
        return scheduler_pb2.FleetMetrics(nodes=nodes)

    def _fleet(self) -> scheduler_pb2.Fleet:
        nodes = [self._fleet_node(n) for n in sorted(self.fleet.nodes.values(), key=lambda n: n.name)]
        return scheduler_pb2.Fleet(nodes=nodes, expected_nodes=self.config.nodes.count)

    def _fleet_node(self, n: Node) -> scheduler_pb2.FleetNode:
        return scheduler_pb2.FleetNode(
            node=n.name,
            worker_address=n.worker_address,
            store_address=n.store_address,
            serving=n.serving,
            models=[_model_to_wire(m) for m in n.models],
            running=n.load.running,
            waiting=n.load.waiting,
            outstanding_tokens=n.load.outstanding_tokens,
            advised=self.advisories.on_node(n.name),
            hbm_pages_total=n.load.hbm_pages_total,
            hbm_pages_free=n.load.hbm_pages_free,
            dram_bytes_total=n.dram_bytes_total,
            dram_bytes_used=n.dram_bytes_used,
            ssd_bytes_used=n.ssd_bytes_used,
            sessions=self.directory.count(n.name),
        )

    async def ListSessions(self, request: scheduler_pb2.ListSessionsRequest, context: Any) -> scheduler_pb2.ListSessionsReply:
        """The most recently used sessions of a tenant (or of all)."""
        wanted = [s for s in self.directory if not request.tenant or s.key.tenant == request.tenant]
        wanted.sort(key=lambda s: -s.last_use_s)
        return scheduler_pb2.ListSessionsReply(sessions=[self._summary(s.key) for s in wanted[: request.limit or 100]])

    def _summary(self, key: SessionKey) -> scheduler_pb2.SessionSummary:
        session, pending = self.directory.get(key), self.advisories.get(key)
        summary = scheduler_pb2.SessionSummary(session=session_to_wire(key), node=pending.node if pending else "")
        if session:
            summary.model, summary.tokens, summary.last_use_s = session.model, session.tokens, session.last_use_s
            summary.held_by.extend(session.sources())
        return summary

    async def GetSession(self, request: scheduler_pb2.GetSessionRequest, context: Any) -> scheduler_pb2.SessionInfo:
        """A session's residency, asked of every store that is here."""
        key = session_from_wire(request.session)
        names = [n.name for n in self.fleet.nodes.values() if n.store_here]
        replies = await asyncio.gather(*(self._residency(n, key) for n in names))
        heard = [(n, r) for n, r in zip(names, replies, strict=True) if r is not None and r.known]
        nodes = [scheduler_pb2.NodeResidency(node=n, tiers=r.tiers) for n, r in heard]
        return scheduler_pb2.SessionInfo(summary=self._summary(key), known=bool(nodes) or self.directory.get(key) is not None, nodes=nodes)

    async def _residency(self, node: str, key: SessionKey) -> kvstore_pb2.ResidencyReply | None:
        address = self.fleet.nodes[node].store_address
        if address not in self._channels:
            self._channels[address] = rpc.channel(address)
        stub: Any = kvstore_pb2_grpc.KvStoreStub(self._channels[address])  # type: ignore[no-untyped-call]
        try:
            reply: kvstore_pb2.ResidencyReply = await stub.Residency(
                kvstore_pb2.ResidencyRequest(session=session_to_wire(key)), timeout=RESIDENCY_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as e:
            log.warning("no residency", node=node, error=e.details())
            return None
        return reply

    async def EraseSession(self, request: scheduler_pb2.EraseSessionRequest, context: Any) -> scheduler_pb2.EraseSessionReply:
        """Forget the session here, tell every store to erase it from every tier, and wait for their word, for a while."""
        key = session_from_wire(request.session)
        known = self.directory.erase(key)
        self.advisories.invalidate(key, key.tenant, "")
        told = sorted(self._stores)
        expected = {self.config.node(n).name for n in range(self.config.nodes.count)}
        erasure = self.erasures.begin(key, expected | set(told))
        for node in told:
            self._command(node, scheduler_pb2.StoreCommand(erase=request.session))
        with contextlib.suppress(TimeoutError):
            # A node that is away is waited for only as long as one that is here has not answered.
            async with asyncio.timeout(ERASE_S), self._erasure_heard:
                await self._erasure_heard.wait_for(lambda: all(n in erasure.words for n in told if n in self._stores))
        return _erased(known, told, expected, erasure)


def _erased(known: bool, told: list[str], expected: set[str], erasure: Erasure) -> scheduler_pb2.EraseSessionReply:
    nodes = []
    for name in sorted({*told, *expected}):
        word = erasure.words.get(name)
        left = [scheduler_pb2.TierLeft(tier=tier, chunks=chunks) for tier, chunks in word.left.items()] if word else []
        nodes.append(scheduler_pb2.NodeErasure(node=name, answered=word is not None, verified=bool(word and word.verified), left=left))
    known = known or any(word.known for word in erasure.words.values())
    return scheduler_pb2.EraseSessionReply(known=known, nodes=told, verified=not erasure.owing, erasures=nodes)


def _model_to_wire(m: Model) -> scheduler_pb2.ModelInfo:
    return scheduler_pb2.ModelInfo(name=m.name, shape=shape_to_wire(m.shape), max_tokens=m.max_tokens, created_s=m.created_s)


def _model(m: scheduler_pb2.ModelInfo) -> Model:
    return Model(m.name, shape_from_wire(m.shape), m.max_tokens, m.created_s)


async def _refuse(context: Any, error: RequestError) -> None:
    """End the call with the error in the details, as JSON of `contracts.errors.to_wire`."""
    await context.abort(_STATUS.get(error.status, grpc.StatusCode.FAILED_PRECONDITION), json.dumps(to_wire(error)))
