"""The gRPC face of a node's store (proto: kvstore.proto). Converts and delegates; decides nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from itertools import zip_longest
from typing import Any

from contracts.convert import manifest_to_wire, session_from_wire
from contracts.ids import SessionKey
from contracts.v1 import common_pb2
from contracts.v1 import kvstore_pb2 as pb
from contracts.v1.kvstore_pb2_grpc import KvStoreServicer
from kvstore.attachment import Attachment
from kvstore.finding import manifest_of, residency
from kvstore.lending import Lending
from kvstore.node import StoreNode
from kvstore.peers import card_to_wire
from runtime.callers import as_node


class Server(KvStoreServicer):
    """See the module."""

    def __init__(self, node: StoreNode) -> None:
        self._node = node
        self._lending = Lending(node)
        self._attachments: set[Attachment] = set()
        #: Questions that are being answered.
        self._residencies: dict[tuple[SessionKey, bool], asyncio.Task[pb.ResidencyReply]] = {}

    async def Attach(self, messages: AsyncIterator[pb.WorkerToStore], context: Any) -> AsyncIterator[pb.StoreToWorker]:
        """A worker's stream, for as long as it lives."""
        await as_node(context, "KvStore/Attach", self._node.name)
        attachment = Attachment(self._node)
        self._attachments.add(attachment)
        reading = asyncio.ensure_future(attachment.read(messages))
        try:
            while (message := await attachment.outgoing.get()) is not None:
                yield message
        finally:
            self._attachments.discard(attachment)
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await reading
            attachment.gone()

    async def PeerIntroduce(self, request: pb.PeerCard, context: Any) -> pb.PeerCard:
        """This node's identity, and how its arena is read."""
        await as_node(context, "KvStore/PeerIntroduce", request.node)
        await self._node.ready.wait()
        return card_to_wire(self._node.peers.own_card)

    async def PeerLease(self, request: pb.PeerLeaseRequest, context: Any) -> AsyncIterator[pb.PeerPieces]:
        """Pieces, as they become readable here."""
        await as_node(context, "KvStore/PeerLease", request.reader)
        stream = self._lending.lease(request)
        try:
            async for message in stream:
                yield message
        finally:
            await stream.aclose()  # type: ignore[attr-defined]

    async def PeerRelease(self, request: pb.PeerReleaseRequest, context: Any) -> pb.PeerReleaseReply:
        """The peer no longer needs the lease."""
        if (reader := self._node.leased.reader(request.lease_id)) is not None:
            await as_node(context, "KvStore/PeerRelease", reader)
        self._lending.release(request.lease_id)
        return pb.PeerReleaseReply()

    async def Residency(self, request: pb.ResidencyRequest, context: Any) -> pb.ResidencyReply:
        """How much of a session each tier of this node holds. Who asks while the same is being answered gets that
        answer: one costs the session's length, here and on the workers' threads."""
        asked = session_from_wire(request.session), request.local
        if (answer := self._residencies.get(asked)) is None:
            answer = self._residencies[asked] = asyncio.ensure_future(self._residency(*asked))
            answer.add_done_callback(lambda _: self._residencies.pop(asked, None))
        return await asyncio.shield(answer)

    async def _residency(self, session: SessionKey, local: bool) -> pb.ResidencyReply:
        manifest = await manifest_of(self._node, session, local=local)
        if manifest is None:
            return pb.ResidencyReply(known=False)
        tiers = []
        asked = [
            a.hbm(manifest.fingerprint, manifest.keys)
            for a in self._attachments
            if manifest.fingerprint in a.fingerprints
        ]
        answers = [hbm for hbm in await asyncio.gather(*asked) if hbm is not None]
        if answers:
            tiers.append(_together(answers))
        for tier, held in await residency(self._node, manifest, local=local):
            tiers.append(
                common_pb2.TierResidency(
                    tier=tier, layer_chunks=held.layer_chunks, tokens=held.tokens, bytes=held.bytes
                )
            )
        return pb.ResidencyReply(known=True, manifest=manifest_to_wire(manifest), tiers=tiers)

    async def Flush(self, request: pb.FlushRequest, context: Any) -> pb.FlushReply:
        """Finish write-back within the given time."""
        await as_node(context, "KvStore/Flush", self._node.name)
        complete, pending = await self._node.flush(min(request.timeout_s, 600.0))
        return pb.FlushReply(complete=complete, pending_bytes=pending)


def _together(answers: list[common_pb2.TierResidency]) -> common_pb2.TierResidency:
    """What several workers hold of one session: the sum of their bytes, and the most of it that one of them could
    use."""
    layers = zip_longest(*(a.layer_chunks for a in answers), fillvalue=0)
    return common_pb2.TierResidency(
        tier="hbm",
        layer_chunks=[max(x) for x in layers],
        tokens=max(a.tokens for a in answers),
        bytes=sum(a.bytes for a in answers),
    )
