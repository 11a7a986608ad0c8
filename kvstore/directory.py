"""The streams to the schedulers: reports of this node, and their commands. Reopened forever.

Sessions are reported in full after every hello, then changes a few times a second; the load every second. All
schedulers get all of it, because each may stand in for the others, so an erasure that one ordered is seen by all.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Iterable, Sequence

import grpc

from contracts.advisory import DEFAULT_TTL_S
from contracts.convert import session_from_wire, session_to_wire
from contracts.identity import SCHEDULER
from contracts.ids import SessionKey
from contracts.v1 import scheduler_pb2 as pb
from contracts.v1.scheduler_pb2_grpc import SchedulerStub
from kvstore.core import events as ev
from kvstore.erasing import Answer
from kvstore.leaving import Leaving
from kvstore.metrics import log
from kvstore.node import StoreNode
from kvstore.upkeep import note_gone
from runtime import rpc, telemetry
from runtime.same_secret import Membership
from runtime.service import Tasks

_DELTA_S, _LOAD_EVERY, _RECONNECT_S, _REFUSED_S = 0.25, 4, 0.1, 2.0
#: Most of one message: both sides handle it in a few milliseconds.
_SESSIONS_A_MESSAGE, _CHUNKS_A_MESSAGE = 500, 10_000


class Directory:
    """The streams to all schedulers. `run` once."""

    def __init__(self, node: StoreNode, addresses: Sequence[str], tasks: Tasks, leaving: Leaving) -> None:
        self._node, self._tasks = node, tasks
        membership = Membership()
        self.links = [Link(node, address, tasks, membership, leaving) for address in addresses]
        leaving.is_told = lambda: all(link.told_over for link in self.links)
        for link in self.links:
            node.erasing.answered.append(link.answer)

    async def run(self) -> None:
        """Report until cancelled."""
        for link in self.links:
            self._tasks.start(link.run(), f"scheduler {link.address}")
        dirty = self._node.store.index.dirty
        while True:
            await self._node.clock.sleep(_DELTA_S)
            for link in self.links:
                link.changed.update(dirty)
            dirty.clear()


class Link:
    """The stream to one scheduler. changed: sessions whose residency has changed since they were reported to it."""

    def __init__(self, node: StoreNode, address: str, tasks: Tasks, membership: Membership, leaving: Leaving) -> None:
        self._node, self.address, self._tasks, self._membership = node, address, tasks, membership
        self._leaving, self._connected, self._said_over = leaving, False, False
        self.changed: set[SessionKey] = set()
        self._connections = 0
        self._reported: set[SessionKey] = set()
        self._answers: list[pb.StoreReport] = []  #: answers to erasures, not yet sent

    @property
    def told_over(self) -> bool:
        """Whether this scheduler has been sent that the node has left, or is not connected."""
        return self._said_over or not self._connected

    async def run(self) -> None:
        """Report and execute commands until cancelled; reconnect when the stream breaks. Raises SecretDiffers at the
        start if the scheduler has another cluster secret."""
        channel = rpc.channel(self.address, SCHEDULER, rpc.SCHEDULER_RECONNECT_S)
        while True:
            connected = False
            try:
                stream = SchedulerStub(channel).StoreReports(self._reports(), wait_for_ready=True)  # type: ignore[no-untyped-call]
                async for command in stream:
                    if not connected:
                        log.info("scheduler answers", address=self.address)
                        connected = self._connected = True
                        self._membership.let_in()
                        self._tasks.start(self._node.heed_tombstones(), "heed-tombstones")
                    self._obey(command)
            except grpc.aio.AioRpcError as e:
                if connected:
                    log.warning("scheduler lost", address=self.address, reason=e.code().name)
                self._membership.failed(e, self._node.clock.now())
                if e.code() is grpc.StatusCode.INVALID_ARGUMENT:
                    log.error("the scheduler refuses this node", address=self.address, reason=e.details())
                    await self._node.clock.sleep(_REFUSED_S)
            self._connected = False
            if self._said_over:
                return
            await self._node.clock.sleep(_RECONNECT_S)

    # ---- reports

    async def _reports(self) -> AsyncIterator[pb.StoreReport]:
        node = self._node
        self._connections += 1
        place, connection = node.places.store_address, self._connections
        devices = len(node.places.devices)
        yield pb.StoreReport(
            hello=pb.StoreHello(
                node=node.name, address=place, instance=node.instance, connection=connection, devices=devices
            )
        )
        self._reported.clear()
        self.changed.clear()
        self._answers = [_erased(answer) for answer in node.erasing.open()]
        number, full = 1, True
        for held in self._held(list(node.store.index.manifests), skip_absent=True):
            yield pb.StoreReport(held=pb.HeldSessions(full=full, joining=True, number=number, sessions=held))
            number, full = number + 1, False
            await asyncio.sleep(0)  # let the loop do other work
        if full:
            yield pb.StoreReport(held=pb.HeldSessions(full=True, joining=True, number=number))
        turn = 0
        while True:
            if turn % _LOAD_EVERY == 0:
                yield self._load()
                yield pb.StoreReport(metrics=pb.ProcessMetrics(samples=telemetry.samples()))
            turn += 1
            await node.clock.sleep(_DELTA_S)
            # Report what was erased before the confirmation: then no scheduler still lists this node as a holder.
            answers, self._answers = self._answers, []
            changed, self.changed = self.changed | (node.store.index.dirty if answers else set()), set()
            for held in self._held(changed, skip_absent=False):
                number += 1
                yield pb.StoreReport(held=pb.HeldSessions(number=number, sessions=held))
                await asyncio.sleep(0)
            for answer in answers:
                yield answer
            if self._leaving.asked:
                over = self._leaving.over
                yield pb.StoreReport(leaving=self._left())
                self._said_over = over  # the former message was sent by now

    def _held(self, sessions: Iterable[SessionKey], *, skip_absent: bool) -> Iterable[list[pb.Held]]:
        """Reports in messages of bounded size. A session no longer here is reported once as empty; an erased or expired
        one always, because the scheduler may know it from other nodes."""
        index = self._node.store.index
        part: list[pb.Held] = []
        chunks = 0
        for session in sessions:
            manifest = index.manifests.get(session)
            here, dram, size = index.held(session)
            if not here and (skip_absent or (manifest is not None and session not in self._reported)):
                continue
            (self._reported.add if here else self._reported.discard)(session)
            chunks += len(manifest.keys) if manifest else 0
            part.append(
                pb.Held(
                    session=session_to_wire(session),
                    model=manifest.model if manifest else "",
                    tokens_total=manifest.tokens if manifest else 0,
                    tokens_here=here,
                    bytes_here=size,
                    last_use_s=manifest.last_use_s if manifest else 0.0,
                    tokens_dram=dram,
                )
            )
            if len(part) >= _SESSIONS_A_MESSAGE or chunks >= _CHUNKS_A_MESSAGE:
                yield part
                part, chunks = [], 0
        if part:
            yield part

    def _load(self) -> pb.StoreReport:
        store = self._node.store
        return pb.StoreReport(
            load=pb.StoreLoad(
                dram_bytes_total=store.ledger.arena_bytes,
                dram_bytes_used=store.ledger.used_bytes,
                ssd_bytes_used=store.index.ssd_bytes,
            )
        )

    def _left(self) -> pb.StoreLeaving:
        leaving = self._leaving
        return pb.StoreLeaving(over=leaving.over, waits_for=leaving.waits_for, pending_bytes=self._node.pending_bytes)

    # ---- commands

    def _obey(self, command: pb.StoreCommand) -> None:
        node, now = self._node, self._node.clock.now()
        kind = command.WhichOneof("kind")
        if kind == "prefetch":
            advisory = command.prefetch.advisory
            node.traces.advised(session_from_wire(advisory.session), advisory.trace)
            node.handle(_advised(command.prefetch, now))
        elif kind == "invalidate":
            node.handle(ev.Invalidated(session_from_wire(command.invalidate), now))
        elif kind == "erase":
            self._tasks.start(node.erasing.erase(session_from_wire(command.erase)), "erase")
        elif kind == "erase_again":
            again = command.erase_again
            self._tasks.start(node.erasing.erase(session_from_wire(again.session), again.number), "erase")
        elif kind == "peers":
            self._tasks.start(self._meet(command.peers), "peers")
        elif kind == "leave":
            self._leaving.begin()

    def answer(self, answer: Answer) -> None:
        """Tell this scheduler an erasure's answer, whichever scheduler ordered it."""
        self._answers.append(_erased(answer))

    async def _meet(self, told: pb.FleetPeers) -> None:
        await self._node.ready.wait()
        self._node.members.told(self.address, told.members, told.gone)
        with contextlib.suppress(asyncio.CancelledError):
            self._node.peers.addresses.update(told.addresses)
        await note_gone(self._node)  # else with the next confirmations


def _advised(command: pb.PrefetchCommand, now: float) -> ev.Advised:
    a = command.advisory
    arrival = a.expected_arrival_s if a.HasField("expected_arrival_s") else math.inf
    lifetime = (0.0 if arrival == math.inf else arrival) + (a.ttl_s or DEFAULT_TTL_S)
    return ev.Advised(
        session_from_wire(a.session), a.priority, arrival, lifetime, list(command.source_nodes), now, command.device
    )


def _erased(a: Answer) -> pb.StoreReport:
    left = [pb.TierLeft(tier=tier, chunks=chunks) for tier, chunks in a.left.items() if chunks]
    return pb.StoreReport(
        erased=pb.Erased(
            session=session_to_wire(a.session),
            verified=a.verified,
            known=a.known,
            left=left,
            number=a.number,
            taken=a.taken,
        )
    )
