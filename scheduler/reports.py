"""The streams of stores and workers: passes their reports to the core and the core's commands to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from typing import Any

from contracts.convert import session_from_wire, session_to_wire
from contracts.devices import MOST_DEVICES, device_name, node_of, number_of
from contracts.errors import InvalidRequest
from contracts.ids import SessionKey
from contracts.v1 import scheduler_pb2
from runtime import telemetry
from runtime.clock import Clock
from scheduler.convert import hint_to_wire, load_from_wire, models_from_wire, moves_from_wire, rates_from_wire
from scheduler.core.attached import Attached, Stream
from scheduler.core.commands import Command, Prefetch, Spare, Wake
from scheduler.core.control import Control
from scheduler.core.directory import Held
from scheduler.core.directory import Report as HeldReport
from scheduler.core.erasures import Word
from scheduler.erasure_waits import ErasureWaits

log = telemetry.logger("scheduler.reports")
#: Workers are told a new report interval when it has changed by this share.
_NOTABLE = 0.2
#: Stores that join within this time, plus this time per store, are announced to the others together, in seconds. One
#: message for each pair of a thousand stores would be a million.
_INTRODUCE_S, _INTRODUCE_STORE_S = 0.02, 5e-4
#: A process that was heard this long ago or less keeps its node's name, in seconds.
_ALIVE_S = 3.0
#: Ends a stream's writer.
_END = None


class Reports:
    """See the module. erasure_waits: told of stores' answers to erasures, and of stores that leave. joined: called when
    a store or worker joins."""

    def __init__(self, control: Control, clock: Clock) -> None:
        self._control, self._clock = control, clock
        self._stores: dict[str, asyncio.Queue[Any]] = {}
        self._workers: dict[str, asyncio.Queue[Any]] = {}
        self._store_streams, self._worker_streams = Attached(), Attached()
        self._report_every_s = 0.0
        self._unannounced: set[str] = set()  #: stores not yet announced to the others
        self.erasure_waits = ErasureWaits(self._stores.keys())
        self.joined: Callable[[], object] = lambda: None
        #: What a device's worker says of fine-tuning jobs; and that it has left, or has come and not said anything yet.
        self.finetunes_reported: Callable[[str, scheduler_pb2.FinetuneReport], object] = lambda device, report: None
        self.trainer_left: Callable[[str], object] = lambda device: None
        self._gone: set[str] | None = None  #: nodes that left and that stores are to be told of; None: nothing is
        #: What a store that is to leave says of it.
        self.store_leaving: Callable[[str, scheduler_pb2.StoreLeaving], object] = lambda node, said: None

    @property
    def stores(self) -> list[str]:
        """Nodes whose stores are connected."""
        return sorted(self._stores)

    # ---- commands ----------------------------------------------------------------------------------------------
    def command(self, node: str, command: scheduler_pb2.StoreCommand) -> None:
        """Send a command to a node's store, if it is connected."""
        queue = self._stores.get(node)
        if queue is not None:
            queue.put_nowait(command)

    def carry_out(self, commands: Iterable[Command], now: float | None = None) -> None:
        """Send the core's commands to stores and workers. now: the time of the decision, to which times are
        relative."""
        now = self._clock.now() if now is None else now
        for c in commands:
            if isinstance(c, Prefetch):
                advisory, device = hint_to_wire(c.hint, now), number_of(c.node)
                prefetch = scheduler_pb2.PrefetchCommand(advisory=advisory, source_nodes=c.sources, device=device)
                self.command(node_of(c.node), scheduler_pb2.StoreCommand(prefetch=prefetch))
            elif isinstance(c, Wake):
                wake = scheduler_pb2.WakeModel(
                    model=c.model,
                    arrival_s=max(c.arrival_s - now, 0.0),
                    expires_s=max(c.expires_s - now, 0.0),
                    moves=c.moves,
                )
                self.command_worker(c.node, scheduler_pb2.WorkerCommand(wake=wake))
            elif isinstance(c, Spare):
                spare = scheduler_pb2.SpareModel(model=c.model, expires_s=max(c.expires_s - now, 0.0))
                self.command_worker(c.node, scheduler_pb2.WorkerCommand(spare=spare))
            else:
                self.command(node_of(c.node), scheduler_pb2.StoreCommand(invalidate=session_to_wire(c.session)))

    def command_worker(self, device: str, command: scheduler_pb2.WorkerCommand) -> None:
        """Send a command to a device's worker, if it is connected."""
        if (queue := self._workers.get(device)) is not None:
            queue.put_nowait(command)

    def _pace_workers(self) -> None:
        """Tell the workers how often to report, if that has changed notably."""
        wanted, told = self._control.fleet.report_every_s, self._report_every_s
        if abs(wanted - told) > _NOTABLE * told:
            self._report_every_s = wanted
            for queue in self._workers.values():
                queue.put_nowait(scheduler_pb2.WorkerCommand(report_every_s=wanted))

    # ---- workers -----------------------------------------------------------------------------------------------
    async def of_worker(
        self, reports: AsyncIterator[scheduler_pb2.WorkerReport]
    ) -> AsyncIterator[scheduler_pb2.WorkerCommand]:
        """Take one worker's reports and yield its commands until its stream ends. Raises InvalidRequest for an invalid
        hello."""
        commands: asyncio.Queue[Any] = asyncio.Queue()
        async for command in _written(commands, self._read_worker(reports, commands)):
            yield command

    async def _read_worker(
        self, reports: AsyncIterator[scheduler_pb2.WorkerReport], commands: asyncio.Queue[Any]
    ) -> None:
        stream: Stream | None = None
        fleet, attached = self._control.fleet, self._worker_streams
        try:
            async for report in reports:
                now = self._clock.now()
                kind = report.WhichOneof("kind")
                if kind == "hello":
                    hello = report.hello
                    own = device_name(hello.node, hello.device, hello.devices or 1)
                    models = models_from_wire(hello, fleet.wires(but=own))
                    name = self._admit(hello.node, hello.devices, hello.device)
                    stream = Stream(name, hello.instance, hello.connection)
                    self._refuse_other(stream, attached, fleet.device(name).worker_address, hello.address, now)
                    if not attached.join(stream):
                        return
                    self._workers[name] = commands
                    self.trainer_left(name)
                    fleet.worker_joined(name, hello.address, models, now, rates_from_wire(hello), hello.device_bytes)
                    device = fleet.device(name)
                    device.instance = hello.instance
                    device.left_out = {model: why[:300] for model, why in hello.left_out.items()}
                    log.info("worker joined", node=name, address=hello.address)
                    self.joined()
                    self._pace_workers()
                    commands.put_nowait(scheduler_pb2.WorkerCommand(report_every_s=self._report_every_s))
                elif stream is None or not attached.counts(stream):
                    continue
                elif kind == "metrics":
                    fleet.device(stream.name).worker_metrics = dict(report.metrics.samples)
                elif kind == "moves":
                    fleet.device(stream.name).moves = moves_from_wire(report.moves, now)
                elif kind == "finetunes":
                    self.finetunes_reported(stream.name, report.finetunes)
                elif kind == "load":
                    r = report.load
                    fleet.loaded(stream.name, load_from_wire(r), r.in_flight, r.finished, now, r.number)
                    self._control.callgraphs.finished(r.finished, now)
                    if r.draining:
                        fleet.drain(stream.name)
        finally:
            if stream is not None and attached.leave(stream):
                del self._workers[stream.name]
                self.trainer_left(stream.name)
                self._control.worker_left(stream.name, self._clock.now())
                log.info("worker left", node=stream.name)

    def _admit(self, node: str, devices: int, device: int = 0) -> str:
        """The name of a device by a hello; its node becomes a member, with all its devices. Raises InvalidRequest for
        an impossible name or number."""
        devices = devices or 1
        if not device < devices <= MOST_DEVICES:
            raise InvalidRequest(
                f"{node} says that it has {devices} devices, of which this is number {device}", param="devices"
            )
        joined = self._control.membership.hello(node)
        self._control.fleet.add(node, devices)
        if joined:
            log.info("a node has joined the fleet", node=node)
            self.members_changed()
        return device_name(node, device, devices)

    def _refuse_other(self, new: Stream, attached: Attached, known: str, address: str, now: float) -> None:
        """Raise InvalidRequest when a process at another address has this name and was heard a moment ago. One that was
        moved is let in once its former stream is silent."""
        current = attached.current(new.name)
        if current is None or current.instance == new.instance or known == address:
            return
        fleet = self._control.fleet
        heard_s = fleet.devices[new.name].heard_s if attached is self._worker_streams else fleet.nodes[new.name].heard_s
        if now - heard_s < _ALIVE_S:
            raise InvalidRequest(
                f"{new.name} runs already at {known}; give the one at {address} another number (--node)", param="node"
            )

    def members_changed(self, gone: Iterable[str] = ()) -> None:
        """Tell every store soon who belongs to the fleet. gone: nodes that have just left it."""
        self._control.fleet.version += 1
        if self._gone is None:
            self._gone = set()
            asyncio.get_running_loop().call_later(self._introduce_s, self._tell_members)
        self._gone.update(gone)

    def _tell_members(self) -> None:
        members, gone, self._gone = self._control.membership.members, self._gone or set(), None
        told = scheduler_pb2.FleetPeers(members=sorted(members), gone=sorted(gone - members))
        for name in self._stores:
            self.command(name, scheduler_pb2.StoreCommand(peers=told))

    # ---- stores ------------------------------------------------------------------------------------------------
    async def of_store(
        self, reports: AsyncIterator[scheduler_pb2.StoreReport]
    ) -> AsyncIterator[scheduler_pb2.StoreCommand]:
        """Take one store's reports and yield its commands until its stream ends. Raises InvalidRequest for an invalid
        hello."""
        commands: asyncio.Queue[Any] = asyncio.Queue()
        async for command in _written(commands, self._read_store(reports, commands)):
            yield command

    async def _read_store(
        self, reports: AsyncIterator[scheduler_pb2.StoreReport], commands: asyncio.Queue[Any]
    ) -> None:
        stream: Stream | None = None
        control, attached = self._control, self._store_streams
        kinds: dict[str, Callable[[str, Any], None]] = {
            "held": self._held,
            "load": self._store_load,
            "metrics": self._store_metrics,
            "leaving": self._store_leaving,
            "erased": self._erased,
        }
        try:
            async for report in reports:
                kind = report.WhichOneof("kind") or ""
                if kind == "hello":
                    hello = report.hello
                    stream = Stream(hello.node, hello.instance, hello.connection)
                    self._admit(hello.node, hello.devices)
                    now, known = self._clock.now(), control.fleet.nodes[hello.node]
                    self._refuse_other(stream, attached, known.store_address, hello.address, now)
                    if not attached.join(stream):
                        return
                    known.heard_s = now
                    self._stores[hello.node] = commands
                    control.store_joined(hello.node, hello.address)
                    log.info("store joined", node=hello.node, address=hello.address)
                    self.joined()
                    self._introduce(hello.node)
                    for session, number in control.erasures.owed_by(hello.node):
                        self.command(hello.node, _erase_again(session, number))
                elif stream is None or not attached.counts(stream):
                    continue
                elif kind in kinds:
                    kinds[kind](stream.name, getattr(report, kind))
        finally:
            if stream is not None and attached.leave(stream):
                del self._stores[stream.name]
                control.store_left(stream.name)
                self.erasure_waits.store_left(stream.name)
                log.info("store left", node=stream.name)

    def _held(self, name: str, report: scheduler_pb2.HeldSessions) -> None:
        told = [_held_from_wire(h) for h in report.sessions]
        self._control.held(name, told, full=report.full, joining=report.joining, number=report.number)

    def _store_load(self, name: str, load: scheduler_pb2.StoreLoad) -> None:
        node = self._control.fleet.node(name)
        node.heard_s = self._clock.now()
        node.dram_bytes_total, node.dram_bytes_used, node.ssd_bytes_used = (
            load.dram_bytes_total,
            load.dram_bytes_used,
            load.ssd_bytes_used,
        )

    def _store_metrics(self, name: str, metrics: scheduler_pb2.ProcessMetrics) -> None:
        self._control.fleet.node(name).store_metrics = dict(metrics.samples)

    def _store_leaving(self, name: str, said: scheduler_pb2.StoreLeaving) -> None:
        self.store_leaving(name, said)

    def _erased(self, name: str, e: scheduler_pb2.Erased) -> None:
        word = Word(e.verified, e.known, {left.tier: left.chunks for left in e.left}, e.number, e.taken or e.verified)
        session = session_from_wire(e.session)
        for node in self._control.erasures.heard(name, session, word, self._control.membership.members):
            self.command(node, _erase_again(session, e.number))
        self.erasure_waits.heard(session)

    @property
    def _introduce_s(self) -> float:
        return _INTRODUCE_S + _INTRODUCE_STORE_S * len(self._stores)

    def _introduce(self, joined: str) -> None:
        """Announce all stores to the one that joined, and soon that one to the others."""
        here = {n.name: n.store_address for n in self._control.fleet.nodes.values() if n.store_here}
        told = scheduler_pb2.FleetPeers(addresses=here, members=sorted(self._control.membership.members))
        self.command(joined, scheduler_pb2.StoreCommand(peers=told))
        if not self._unannounced:
            asyncio.get_running_loop().call_later(self._introduce_s, self._announce)
        self._unannounced.add(joined)

    def _announce(self) -> None:
        nodes, joined = self._control.fleet.nodes, sorted(self._unannounced)
        self._unannounced.clear()
        here = {name: nodes[name].store_address for name in joined if nodes[name].store_here}
        told = scheduler_pb2.StoreCommand(peers=scheduler_pb2.FleetPeers(addresses=here))
        for name in self._stores:
            self.command(name, told)


def _erase_again(session: SessionKey, number: int) -> scheduler_pb2.StoreCommand:
    """The command to repeat an erasure. Without a number it erases whatever the node has of the session."""
    if not number:
        return scheduler_pb2.StoreCommand(erase=session_to_wire(session))
    return scheduler_pb2.StoreCommand(
        erase_again=scheduler_pb2.EraseAgain(session=session_to_wire(session), number=number)
    )


def _held_from_wire(h: scheduler_pb2.Held) -> HeldReport:
    held = Held(h.tokens_here, h.bytes_here, h.tokens_dram)
    return session_from_wire(h.session), h.model, h.tokens_total, h.last_use_s, held


async def _written(commands: asyncio.Queue[Any], reading: Coroutine[Any, Any, None]) -> AsyncIterator[Any]:
    """Yield what is put into the queue until `reading` ends; an error of it ends the stream."""
    reader = asyncio.ensure_future(reading)
    reader.add_done_callback(lambda _: commands.put_nowait(_END))
    try:
        while (command := await commands.get()) is not _END:
            yield command
        await reader
    finally:
        reader.cancel()
