"""Both transports together: a peer is read by NIXL where both ends have it, and over sockets otherwise.

Whether UCX reaches a peer shows only when tried (containers, namespaces, firewalls). A peer for which NIXL failed and a
socket worked is read over sockets until it restarts.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.tiers.transport import Card, GivenUp, PeerRange, Transport, never
from runtime import telemetry

log = telemetry.logger("kvstore.transport")


class AutoTransport:
    """`nixl` and `sockets` are not started yet. `start` starts what works and raises OSError when neither does."""

    def __init__(self, nixl: Transport, sockets: Transport) -> None:
        self._nixl: Transport | None = nixl
        self._sockets: Transport | None = sockets
        self._unreachable: set[str] = set()  #: instances that NIXL failed for

    @property
    def name(self) -> str:
        """The transports that work here."""
        return "+".join(t.name for t in (self._nixl, self._sockets) if t is not None)

    async def start(self) -> None:
        if self._nixl is not None:
            try:
                await self._nixl.start()
            except Exception as e:
                log.warning("no NIXL; peers read over sockets", reason=str(e))
                self._nixl = None
        if self._sockets is not None:
            try:
                await self._sockets.start()
            except OSError as e:
                if self._nixl is None:
                    raise
                log.warning("no socket transport beside NIXL", reason=str(e))
                self._sockets = None

    def fill(self, card: Card) -> Card:
        for transport in (self._nixl, self._sockets):
            card = transport.fill(card) if transport is not None else card
        return card

    async def read(self, peer: Card, lease: str, ranges: Sequence[PeerRange], given_up: GivenUp = never) -> bool:
        by_nixl = self._nixl is not None and peer.nixl_metadata and peer.instance not in self._unreachable
        if by_nixl and self._nixl is not None and await self._nixl.read(peer, lease, ranges, given_up):
            return True
        if given_up():
            return False
        if (
            self._sockets is None
            or not peer.socket_address
            or not await self._sockets.read(peer, lease, ranges, given_up)
        ):
            return False
        if by_nixl:
            log.warning("NIXL does not reach a peer; it is read over sockets", node=peer.node)
            self._unreachable.add(peer.instance)
        return True

    async def forget(self, peer: Card) -> None:
        for transport in (self._nixl, self._sockets):
            if transport is not None:
                await transport.forget(peer)

    async def stop(self) -> None:
        for transport in (self._nixl, self._sockets):
            if transport is not None:
                await transport.stop()
