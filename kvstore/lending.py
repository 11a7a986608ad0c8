"""This node as the owner of lent pieces: a peer reads them from the arena, where they are pinned until it releases
them, dies, or a minute has passed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from contracts.convert import layers_from_bitmap
from contracts.v1 import kvstore_pb2 as pb
from kvstore.core import events as ev
from kvstore.core import instructions as do
from kvstore.failpoints import reach
from kvstore.metrics import count
from kvstore.node import StoreNode
from runtime.outgoing import Outgoing

_LIFETIME_S = 60.0
#: Most pieces of a joined message. A peer reads them as one, and verifies them while the next are read.
_JOINED_PIECES = 64


def _join(last: pb.PeerPieces, new: pb.PeerPieces) -> bool:
    if not last.chunks or not new.chunks or len(last.chunks) + len(new.chunks) > _JOINED_PIECES:
        return False
    last.MergeFrom(new)
    return True


class _Loan:
    """One lease, as the owner of its load."""

    def __init__(self, node: StoreNode, lease: str, piece_bytes: int) -> None:
        self._node = node
        self._lease = lease
        self._piece_bytes = piece_bytes
        self.outgoing = Outgoing(_join)

    def answer(self, instruction: do.Found | do.Pieces | do.End | do.Grant) -> None:
        """Owner.answer"""
        match instruction:
            case do.Found():
                self.outgoing.put(
                    pb.PeerPieces(held=instruction.indices, in_dram=instruction.in_arena, due_s=instruction.due_s)
                )
            case do.Pieces(pieces=pieces):
                self._node.leased.add(self._lease, [(p[2], self._piece_bytes) for p in pieces])
                chunks, layers, offsets, checksums = zip(*pieces, strict=True)
                self.outgoing.put(pb.PeerPieces(chunks=chunks, layers=layers, offsets=offsets, checksums=checksums))
            case do.End():
                self.outgoing.put(None)


class Lending:
    """See the module."""

    def __init__(self, node: StoreNode) -> None:
        self._node = node
        self._timers: dict[str, asyncio.TimerHandle] = {}

    async def lease(self, request: pb.PeerLeaseRequest) -> AsyncIterator[pb.PeerPieces]:
        """Yield messages to the peer until all available pieces were announced. Cancelling it ends the lease."""
        node, owner = self._node, f"peer-{request.lease_id}"
        shape = node.store.index.shapes.get(request.fingerprint)
        if owner in node.owners or owner in self._timers or not request.lease_id:
            count("peer_leases_refused")
            return
        if shape is None:
            yield pb.PeerPieces()
            return
        loan = _Loan(node, request.lease_id, shape.piece_bytes)
        node.owners[owner] = loan
        node.leased.open(request.lease_id, request.reader)
        wants = [(c.key, tuple(layers_from_bitmap(c.layers, shape.layers))) for c in request.chunks]
        whole = False
        try:
            event = ev.LoadWanted(
                (owner, "0"), ev.LoadKind.PEER, None, request.fingerprint, wants, (), 0, node.clock.now()
            )
            node.handle(event)
            reach("peer.leased")
            while (message := await loan.outgoing.get()) is not None:
                yield message
                reach("peer.sending")
            whole = True
        finally:
            if whole and owner in node.owners:
                self._timers[owner] = asyncio.get_running_loop().call_later(_LIFETIME_S, self.release, request.lease_id)
            else:
                self.release(request.lease_id)

    def release(self, lease: str) -> None:
        """Unpin the lease's pieces."""
        owner = f"peer-{lease}"
        timer = self._timers.pop(owner, None)
        if timer is not None:
            timer.cancel()
        self._node.leased.close(lease)
        if self._node.owners.pop(owner, None) is not None:
            self._node.handle(ev.WorkerGone(owner, self._node.clock.now()))
