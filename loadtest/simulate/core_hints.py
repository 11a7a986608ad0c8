"""Hinted sessions' way into the HBM of a node with every core in full: what is asked for next is decided by the worker's own core
(`worker.core.prefetch`); here it is asked of the node's store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from contracts.ids import SessionKey
from kvstore.core import events as ev
from kvstore.core import instructions as do
from loadtest.simulate.core_turns import HintedBand
from loadtest.simulate.events import Events
from worker.core.prefetch import IN_FLIGHT, Offer, Offers

if TYPE_CHECKING:
    from loadtest.simulate.core_node import CoreNode


class HintedLoads:
    """See the module."""

    def __init__(self, node: CoreNode, events: Events) -> None:
        self._node, self._events = node, events
        self.offers = Offers(node.cache)

    def forget(self, session: SessionKey) -> None:
        """Its request is here, or its hint is void: no more of it is asked for."""
        self.offers.forget(session)

    def give_way(self, session: SessionKey) -> None:
        """Its request takes its pages now: what is on its way for the hint is the request's to ask for."""
        for ident, load in [(i, b) for i, b in self._node.loads.items() if isinstance(b, HintedBand) and b.session == session]:
            del self._node.loads[ident]
            self._node.store.handle(ev.LoadCancelled(ident, self._events.now))
            for block in load.blocks:
                block.moving -= 1
                self._node.cache.settle(block)

    def offered(self, offer: do.Offer) -> None:
        """The store brings this session up."""
        now = self._events.now
        arrival_s, expires_s = now + offer.arrival_s, now + offer.expires_s
        self.offers.put(known := Offer(offer.session, list(offer.keys), offer.priority, now, arrival_s, expires_s))
        self._events.at(known.from_s, self.pump)

    def turn_ended(self) -> None:
        """There may be room for others."""
        self.offers.try_again()
        self.pump()

    def pump(self) -> None:
        """Ask for the next bands of sessions that are coming, as long as loads and room allow."""
        under_way = sum(isinstance(load, HintedBand) for load in self._node.loads.values())
        while under_way < IN_FLIGHT and (band := self.offers.take(self._events.now)) is not None:
            under_way += 1
            for block in band.blocks:
                block.moving += 1
            load, offer = self._node.new_load(), band.offer
            self._node.loads[load] = HintedBand(offer.session, band.blocks)
            wants = [(key, tuple(layers)) for key, layers in zip(band.keys, band.layers, strict=True)]
            args = (offer.session, self._node.shape.fingerprint, wants, (), offer.priority, self._events.now)
            self._node.store.handle(ev.LoadWanted(load, ev.LoadKind.PREFETCH, *args))
