"""What gateways and users see: the fleet, sessions and where their cache is, and erasures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import grpc

from contracts import identity
from contracts.convert import session_from_wire, session_to_wire
from contracts.devices import node_of, number_of
from contracts.ids import SessionKey
from contracts.v1 import kvstore_pb2, kvstore_pb2_grpc, scheduler_pb2
from runtime import rpc, telemetry
from runtime.clock import Clock
from runtime.config import Config
from scheduler.convert import loads_to_wire, memory_to_wire, model_explanation, model_to_wire
from scheduler.core.control import Control
from scheduler.core.device import Device
from scheduler.core.erasures import Erasure
from scheduler.reports import Reports

log = telemetry.logger("scheduler.views")
#: Shortest time between two messages to a watcher, in all and per device, in seconds; the longer one counts.
WATCH_EVERY_S, WATCH_NODE_S = 0.1, 1e-3
#: Devices converted to messages before waiting calls run.
_DRAWN_AT_A_TIME = 16
RESIDENCY_TIMEOUT_S = 1.5
#: How long an erasure waits for the stores' answers, in seconds.
ERASE_S = 10.0


class Views:
    """See the module."""

    def __init__(
        self, config: Config, control: Control, reports: Reports, clock: Clock, gathering: Callable[[], bool]
    ) -> None:
        self._config, self._control, self._reports, self._clock, self._gathering = (
            config,
            control,
            reports,
            clock,
            gathering,
        )
        self._drawn: tuple[tuple[int, bool], scheduler_pb2.Fleet] | None = None
        self._drawing = asyncio.Lock()
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def close(self) -> None:
        """Close the channels to the stores."""
        for channel in self._channels.values():
            await channel.close(None)

    # ---- the fleet ---------------------------------------------------------------------------------------------
    async def watch(self) -> AsyncIterator[scheduler_pb2.Fleet]:
        """The fleet now and at each change, less often if it is large."""
        seen: scheduler_pb2.Fleet | None = None
        while True:
            fleet = await self.fleet()
            if fleet is not seen:
                seen = fleet
                yield fleet
            await asyncio.sleep(max(WATCH_EVERY_S, len(fleet.nodes) * WATCH_NODE_S))

    async def fleet(self) -> scheduler_pb2.Fleet:
        """The fleet now. All callers share one message until something changes."""
        async with self._drawing:
            version = (self._control.fleet.version, self._gathering())
            if self._drawn is None or self._drawn[0] != version:
                fleet = scheduler_pb2.Fleet(
                    expected_nodes=self.expected_devices(),
                    gathering=version[1],
                    members=sorted(self._control.membership.members),
                )
                for n, device in enumerate(sorted(self._control.fleet.current, key=_order), 1):
                    fleet.nodes.append(self._device(device))
                    if not n % _DRAWN_AT_A_TIME:
                        await asyncio.sleep(0)
                self._drawn = version, fleet
            return self._drawn[1]

    def expected_devices(self) -> int:
        """Devices of the members that should serve. Of those that were not heard of since the start, the configured
        ones should."""
        nodes, each = self._control.fleet.nodes, self._config.nodes.devices
        here = [len(nodes[name].devices) for name in self._control.membership.members if name in nodes]
        return sum(here) + each * len(self._control.membership.configured - nodes.keys())

    def _device(self, n: Device) -> scheduler_pb2.FleetNode:
        return scheduler_pb2.FleetNode(
            node=n.name,
            worker_address=n.worker_address,
            store_address=n.node.store_address,
            serving=n.serving,
            models=[model_to_wire(m, n.load.of(m).state) for m in n.models],
            running=n.load.running,
            waiting=n.load.waiting,
            outstanding_tokens=n.load.outstanding_tokens,
            advised=self._control.advisories.on_node(n.name),
            hbm_pages_total=n.load.hbm_pages_total,
            hbm_pages_free=n.load.hbm_pages_free,
            hbm_pages_cached=n.load.hbm_pages_cached,
            dram_bytes_total=n.node.dram_bytes_total,
            dram_bytes_used=n.node.dram_bytes_used,
            ssd_bytes_used=n.node.ssd_bytes_used,
            sessions=self._control.directory.count(n.node.name),
            state=n.state(self._clock.now()),
            stalled=n.stalled(self._clock.now()),
            loads=loads_to_wire(n),
            device_bytes=n.device_bytes,
            device_bytes_free=n.load.device_bytes_free,
            memory=memory_to_wire(n),
        )

    def metrics(self) -> scheduler_pb2.FleetMetrics:
        """Each device's last reported samples, with those of its node's store."""
        nodes = {
            n.name: scheduler_pb2.ProcessMetrics(samples=n.worker_metrics | n.node.store_metrics)
            for n in self._control.fleet.devices.values()
            if n.worker_here or n.node.store_here
        }
        return scheduler_pb2.FleetMetrics(nodes=nodes)

    def explain_model(self, name: str) -> scheduler_pb2.ModelExplanation:
        """When the model's weights came to each device and left it lately, and why."""
        devices = sorted(self._control.fleet.devices.values(), key=_order)
        return model_explanation(name, devices, self._clock.now())

    # ---- sessions ----------------------------------------------------------------------------------------------
    def sessions(self, request: scheduler_pb2.ListSessionsRequest) -> scheduler_pb2.ListSessionsReply:
        """A page of a tenant's sessions, or of all."""
        limit = request.limit or 100
        found = self._control.directory.page(request.tenant, limit + 1, request.after, by_id=request.by_id)
        if found is None:
            return scheduler_pb2.ListSessionsReply(unknown_after=True)
        return scheduler_pb2.ListSessionsReply(
            sessions=[self._summary(s.key) for s in found[:limit]], more=len(found) > limit
        )

    def _summary(self, key: SessionKey) -> scheduler_pb2.SessionSummary:
        session, pending = self._control.directory.get(key), self._control.advisories.get(key)
        summary = scheduler_pb2.SessionSummary(session=session_to_wire(key), node=pending.node if pending else "")
        if session:
            summary.model, summary.tokens, summary.last_use_s = session.model, session.tokens, session.last_use_s
            summary.held_by.extend(session.sources())
        return summary

    async def session(self, key: SessionKey, *, local: bool = False) -> scheduler_pb2.SessionInfo:
        """A session's residency, asked of every connected store.

        local: only of its holders and its hint's node, without the blob tier.
        """
        names = [n.name for n in self._control.fleet.nodes.values() if n.store_here]
        if local:
            pending, held = self._control.advisories.get(key), self._control.directory.get(key)
            concerned = {*(held.sources() if held else ()), *((node_of(pending.node),) if pending else ())}
            names = [name for name in names if name in concerned]
        replies = await asyncio.gather(*(self._residency(n, key, local=local) for n in names))
        heard = [(n, r) for n, r in zip(names, replies, strict=True) if r is not None and r.known]
        nodes = [scheduler_pb2.NodeResidency(node=n, tiers=r.tiers) for n, r in heard]
        known = bool(nodes) or self._control.directory.get(key) is not None
        erasure = self._control.erasures.get(key)
        if erasure is not None and not known:
            return scheduler_pb2.SessionInfo(
                summary=self._summary(key), known=True, erasing=True, erasures=_words(erasure)
            )
        return scheduler_pb2.SessionInfo(summary=self._summary(key), known=known, nodes=nodes)

    async def _residency(self, node: str, key: SessionKey, *, local: bool) -> kvstore_pb2.ResidencyReply | None:
        address = self._control.fleet.nodes[node].store_address
        if address not in self._channels:
            self._channels[address] = rpc.channel(address, identity.node(node))
        stub: Any = kvstore_pb2_grpc.KvStoreStub(self._channels[address])  # type: ignore[no-untyped-call]
        try:
            reply: kvstore_pb2.ResidencyReply = await stub.Residency(
                kvstore_pb2.ResidencyRequest(session=session_to_wire(key), local=local), timeout=RESIDENCY_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as e:
            log.warning("no residency", node=node, error=e.details())
            return None
        return reply

    async def erase(self, request: scheduler_pb2.EraseSessionRequest) -> scheduler_pb2.EraseSessionReply:
        """Forget the session, tell every store to erase it from every tier, and wait up to ERASE_S for answers."""
        key, control = session_from_wire(request.session), self._control
        known = control.erasures.get(key) is not None
        known = control.directory.erase(key) or known
        control.advisories.invalidate(key, key.tenant, "")
        control.explained.forget(key)
        control.callgraphs.erase(key)
        told = self._reports.stores
        expected = set(control.membership.members)
        erasure = control.erasures.begin(key, expected | set(told))
        for node in told:
            self._reports.command(node, scheduler_pb2.StoreCommand(erase=request.session))
        erasure = await self._reports.erasure_waits.wait(key, erasure, told, ERASE_S)
        if not erasure.taken and key not in self._reports.erasure_waits:
            control.erasures.give_up(key)
        return _erased(known, told, expected, erasure)


def _order(device: Device) -> tuple[str, int]:
    return device.node.name, number_of(device.name)


def _erased(known: bool, told: list[str], expected: set[str], erasure: Erasure) -> scheduler_pb2.EraseSessionReply:
    nodes = _words(erasure, {*told, *expected})
    known = known or any(word.known for word in erasure.words.values())
    return scheduler_pb2.EraseSessionReply(
        known=known, nodes=told, verified=not erasure.owing, erasures=nodes, taken=erasure.taken
    )


def _words(erasure: Erasure, names: Iterable[str] = ()) -> list[scheduler_pb2.NodeErasure]:
    """Each node's answer; nodes of `names` and those that owe one are included."""
    nodes = []
    for name in sorted({*names, *erasure.words, *erasure.owing}):
        word = erasure.words.get(name)
        left = [scheduler_pb2.TierLeft(tier=tier, chunks=chunks) for tier, chunks in word.left.items()] if word else []
        nodes.append(
            scheduler_pb2.NodeErasure(
                node=name, answered=word is not None, verified=bool(word and word.verified), left=left
            )
        )
    return nodes
