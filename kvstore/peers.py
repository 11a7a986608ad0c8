"""This node as a reader of other nodes: their addresses and cards, open questions, and reads under leases."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import grpc

from contracts import identity
from contracts.convert import layers_to_bitmap
from contracts.v1 import kvstore_pb2 as pb
from contracts.v1.kvstore_pb2_grpc import KvStoreStub
from kvstore.core.events import Event, Fault, PeerEnded, PeerHolds, PeerReady
from kvstore.core.instructions import AskPeer, Fetch, ReleasePeer
from kvstore.failpoints import reach
from kvstore.tiers.arena import Arena
from kvstore.tiers.ssd_reads import verify
from kvstore.tiers.transport import Card, GivenUp, Transport, never
from runtime import rpc
from runtime.clock import Clock
from runtime.service import Tasks

_INTRODUCE_S = 2.0
_LEASE_S = 60.0


def card_to_wire(card: Card) -> pb.PeerCard:
    return pb.PeerCard(**card._asdict())


def card_from_wire(m: pb.PeerCard) -> Card:
    return Card(m.node, m.instance, m.nixl_metadata, m.arena_base, m.arena_bytes, m.socket_address, m.local_name)


class Peers:
    """See the module. own_card: how peers can read this node."""

    def __init__(
        self,
        addresses: dict[str, str],
        own_card: Card,
        arena: Arena,
        transport: Transport,
        clock: Clock,
        report: Callable[[Event], None],
        tasks: Tasks,
    ) -> None:
        self.addresses = addresses
        self.own_card = own_card
        self._arena = arena
        self._transport = transport
        self._clock = clock
        self._report = report
        self._tasks = tasks
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._cards: dict[str, Card] = {}  #: by lease
        self._known: dict[str, Card] = {}  #: by node
        self._asking: dict[str, asyncio.Task[None]] = {}

    def _stub(self, peer: str) -> KvStoreStub:
        address = self.addresses[peer]
        if address not in self._channels:
            self._channels[address] = rpc.channel(address, identity.node(peer))
        return KvStoreStub(self._channels[address])  # type: ignore[no-untyped-call]

    def ask(self, question: AskPeer, layers: int) -> None:
        """Open a lease and report its answers as events. layers: of the model, for the bitmaps."""
        self._asking[question.lease] = self._tasks.start(self._ask(question, layers), "ask-peer")

    async def _ask(self, question: AskPeer, layers: int) -> None:
        answered = False
        lease = question.lease
        try:
            card = await self._introduce(question.peer)
            self._cards[lease] = card
            request = pb.PeerLeaseRequest(
                lease_id=self._wire_name(lease),
                fingerprint=question.fingerprint,
                chunks=[
                    pb.ChunkWant(key=key, layers=layers_to_bitmap(wanted, layers)) for key, wanted in question.wants
                ],
                reader=self.own_card.node,
            )
            first = True
            async for m in self._stub(question.peer).PeerLease(request, timeout=_LEASE_S):
                if first:
                    self._report(PeerHolds(lease, tuple(m.held), self._clock.now(), tuple(m.in_dram), tuple(m.due_s)))
                    first = False
                if len({len(m.chunks), len(m.layers), len(m.offsets), len(m.checksums)}) == 1 and m.chunks:
                    self._report(
                        PeerReady(
                            lease,
                            tuple(zip(m.chunks, m.layers, m.offsets, m.checksums, strict=True)),
                            self._clock.now(),
                        )
                    )
            answered = True
        except (grpc.aio.AioRpcError, KeyError):
            pass
        finally:
            if self._asking.pop(lease, None) is not None:
                self._report(PeerEnded(lease, answered, self._clock.now()))

    async def _introduce(self, peer: str) -> Card:
        """The peer's current card. A failed channel is replaced, because it may wait before it reconnects."""
        for last in (False, True):
            try:
                wire = await self._stub(peer).PeerIntroduce(card_to_wire(self.own_card), timeout=_INTRODUCE_S)
                break
            except grpc.aio.AioRpcError as e:
                channel = self._channels.pop(self.addresses[peer], None)
                if channel is not None:
                    self._tasks.start(channel.close(None), "close-channel")
                if last or e.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
        card = card_from_wire(wire)
        known = self._known.get(peer)
        if known is not None and known.instance != card.instance:
            await self._transport.forget(known)
        self._known[peer] = card
        return card

    def _wire_name(self, lease: str) -> str:
        return f"{self.own_card.instance}/{lease}"

    def release(self, instruction: ReleasePeer) -> None:
        """End a lease: stop listening, and let the peer unpin."""
        asking = self._asking.pop(instruction.lease, None)
        if asking is not None:
            asking.cancel()
        self._tasks.start(self._release(instruction), "release-peer")

    async def _release(self, instruction: ReleasePeer) -> None:
        self._cards.pop(instruction.lease, None)
        with contextlib.suppress(grpc.aio.AioRpcError, KeyError):
            request = pb.PeerReleaseRequest(lease_id=self._wire_name(instruction.lease))
            await self._stub(instruction.peer).PeerRelease(request, timeout=_INTRODUCE_S)

    async def read(self, fetch: Fetch, given_up: GivenUp = never) -> dict[int, Fault]:
        """Copy a fetch's pieces and verify them. Returns the faults by index. On return nothing writes to its slots any
        more. given_up: see Transport.read."""
        every = dict.fromkeys(range(len(fetch.pieces)), Fault.UNAVAILABLE)
        card = self._cards.get(fetch.lease)
        size = fetch.shape.piece_bytes
        if card is None or any(p.remote_offset + size > card.arena_bytes for p in fetch.pieces):
            return every
        ranges = [(p.remote_offset, p.offset, size) for p in fetch.pieces]
        if not await self._transport.read(card, self._wire_name(fetch.lease), ranges, given_up):
            if given_up():
                return dict.fromkeys(every, Fault.CANCELLED)
            await self._transport.forget(card)
            return every
        reach("peer.read")
        (faults,) = await asyncio.to_thread(verify, self._arena, [(fetch.shape, fetch.pieces)])
        return faults

    async def stop(self) -> None:
        """Close the channels."""
        for channel in self._channels.values():
            await channel.close(None)
