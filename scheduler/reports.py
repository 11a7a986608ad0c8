"""The streams of the nodes' processes: their reports become events of the core, its commands go back to their stores."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from contracts.convert import session_from_wire, session_to_wire
from contracts.v1 import scheduler_pb2
from runtime import telemetry
from runtime.clock import Clock
from scheduler.convert import hint_to_wire, load_from_wire, models_from_wire, rates_from_wire
from scheduler.core.control import Command, Control, Prefetch
from scheduler.core.directory import Held
from scheduler.core.erasures import Word

log = telemetry.logger("scheduler.reports")


class Reports:
    """See the module. `erasure_heard` is notified of every word of a store about an erasure."""

    def __init__(self, control: Control, clock: Clock) -> None:
        self._control, self._clock = control, clock
        self._stores: dict[str, asyncio.Queue[scheduler_pb2.StoreCommand]] = {}
        self._workers: dict[str, str] = {}
        self.erasure_heard = asyncio.Condition()

    @property
    def stores(self) -> list[str]:
        """Nodes whose stores are here."""
        return sorted(self._stores)

    # ---- commands ----------------------------------------------------------------------------------------------
    def command(self, node: str, command: scheduler_pb2.StoreCommand) -> None:
        """Tell a node's store, if it is here."""
        queue = self._stores.get(node)
        if queue is not None:
            queue.put_nowait(command)

    def carry_out(self, commands: Iterable[Command], now: float | None = None) -> None:
        """Tell the stores what the core wants. now: when it was decided, so that times in one list stay apart."""
        now = self._clock.now() if now is None else now
        for c in commands:
            if isinstance(c, Prefetch):
                prefetch = scheduler_pb2.PrefetchCommand(advisory=hint_to_wire(c.hint, now), source_nodes=c.sources)
                self.command(c.node, scheduler_pb2.StoreCommand(prefetch=prefetch))
            else:
                self.command(c.node, scheduler_pb2.StoreCommand(invalidate=session_to_wire(c.session)))

    # ---- workers -----------------------------------------------------------------------------------------------
    async def of_worker(self, reports: AsyncIterator[scheduler_pb2.WorkerReport]) -> AsyncIterator[Any]:
        """One worker's reports, until its stream ends."""
        name, instance, fleet = "", "", self._control.fleet
        try:
            async for report in reports:
                now = self._clock.now()
                kind = report.WhichOneof("kind")
                if kind == "hello":
                    name, instance = report.hello.node, report.hello.instance
                    self._workers[name] = instance
                    fleet.worker_joined(name, report.hello.address, models_from_wire(report.hello), now, rates_from_wire(report.hello))
                    log.info("worker joined", node=name, address=report.hello.address)
                elif not name or self._workers.get(name) != instance:
                    continue
                elif kind == "metrics":
                    fleet.node(name).worker_metrics = dict(report.metrics.samples)
                elif kind == "load":
                    r = report.load
                    fleet.loaded(name, load_from_wire(r), r.in_flight, r.finished, now, r.number)
                    self._control.callgraphs.finished(r.finished, now)
                    if r.draining:
                        fleet.drain(name)
        finally:
            if name and self._workers.get(name) == instance:
                del self._workers[name]
                self._control.worker_left(name)
                log.info("worker left", node=name)
        return
        yield  # an async generator: commands to workers have no content yet beyond ending the stream

    # ---- stores ------------------------------------------------------------------------------------------------
    async def of_store(self, reports: AsyncIterator[scheduler_pb2.StoreReport]) -> AsyncIterator[scheduler_pb2.StoreCommand]:
        """One store's reports, and the commands to it."""
        commands: asyncio.Queue[scheduler_pb2.StoreCommand] = asyncio.Queue()
        reader = asyncio.ensure_future(self._read_store(reports, commands))
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
                self._control.store_left(name)
                log.info("store left", node=name)

    async def _read_store(self, reports: AsyncIterator[scheduler_pb2.StoreReport], commands: asyncio.Queue[Any]) -> None:
        name, control = "", self._control
        kinds: dict[str, Callable[[str, Any], None]] = {"held": self._held, "load": self._store_load, "metrics": self._store_metrics}
        async for report in reports:
            kind = report.WhichOneof("kind") or ""
            if kind == "hello":
                name = report.hello.node
                control.directory.forget_node(name)
                self._stores[name] = commands
                control.fleet.store_joined(name, report.hello.address)
                log.info("store joined", node=name, address=report.hello.address)
                self._tell_peers()
                for session in control.erasures.owed_by(name):
                    self.command(name, scheduler_pb2.StoreCommand(erase=session_to_wire(session)))
            elif not name or self._stores.get(name) is not commands:
                continue
            elif kind == "erased":
                await self._erased(name, report.erased)
            elif kind in kinds:
                kinds[kind](name, getattr(report, kind))

    def _held(self, name: str, report: scheduler_pb2.HeldSessions) -> None:
        if report.full:
            self._control.directory.forget_node(name)
        for h in report.sessions:
            held = Held(h.tokens_here, h.bytes_here, h.tokens_dram)
            self._control.directory.report(name, session_from_wire(h.session), h.model, h.tokens_total, h.last_use_s, held)

    def _store_load(self, name: str, load: scheduler_pb2.StoreLoad) -> None:
        node = self._control.fleet.node(name)
        node.dram_bytes_total, node.dram_bytes_used, node.ssd_bytes_used = load.dram_bytes_total, load.dram_bytes_used, load.ssd_bytes_used

    def _store_metrics(self, name: str, metrics: scheduler_pb2.ProcessMetrics) -> None:
        self._control.fleet.node(name).store_metrics = dict(metrics.samples)

    async def _erased(self, name: str, e: scheduler_pb2.Erased) -> None:
        word = Word(e.verified, e.known, {left.tier: left.chunks for left in e.left})
        async with self.erasure_heard:
            self._control.erasures.heard(name, session_from_wire(e.session), word)
            self.erasure_heard.notify_all()

    def _tell_peers(self) -> None:
        addresses = {n.name: n.store_address for n in self._control.fleet.nodes.values() if n.store_here}
        for name in self._stores:
            self.command(name, scheduler_pb2.StoreCommand(peers=scheduler_pb2.FleetPeers(addresses=addresses)))
