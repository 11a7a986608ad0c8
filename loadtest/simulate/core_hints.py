"""Which hinted sessions a node with every core in full takes into HBM, and when: bands of layers in the worker's own order
(`worker.core.prefetch`), into room that its own victims leave (`worker.core.hbm`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from contracts.ids import SessionKey
from kvstore.core import events as ev
from kvstore.core import instructions as do
from loadtest.simulate.core_turns import HintedBand
from loadtest.simulate.events import Events
from worker.core.hbm import Save
from worker.core.prefetch import BANDS, Offer, band_layers, next_offer
from worker.core.standings import Rank

if TYPE_CHECKING:
    from loadtest.simulate.core_node import CoreNode

#: Loads of hints that are under way at a time, as in `worker.prefetching`.
IN_FLIGHT = 4


class HintedLoads:
    """See the module. offers: of sessions that are coming."""

    def __init__(self, node: CoreNode, events: Events) -> None:
        self._node, self._events = node, events
        self.offers: dict[SessionKey, Offer] = {}

    def forget(self, session: SessionKey) -> None:
        """Its request is here, or its hint is void: no more of it is asked for."""
        self.offers.pop(session, None)

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
        known = self.offers[offer.session] = Offer(offer.session, list(offer.keys), offer.priority, now, arrival_s, expires_s)
        self._events.at(known.from_s, self.pump)

    def pump(self) -> None:
        """Ask for the next bands of sessions that are coming, as long as loads and room allow."""
        while sum(isinstance(load, HintedBand) for load in self._node.loads.values()) < IN_FLIGHT:
            able = [o for o in self.offers.values() if not o.no_room]
            offer = next_offer(able, self._events.now)
            if offer is None:
                break
            if offer.expires_s <= self._events.now or offer.band >= min(BANDS, self._node.shape.layers):
                del self.offers[offer.session]
            elif self._bring(offer):
                offer.band += 1
            else:
                offer.no_room = True  # until the next hint of it

    def _bring(self, offer: Offer) -> bool:
        """Ask for an offer's band. False: there is no room for it."""
        cache, layers = self._node.cache, list(band_layers(offer.band, self._node.shape.layers))
        known = [cache.index.get(key) for key in offer.keys]
        gaps = [[n for n in layers if block is None or block.pages[n] < 0] for block in known]
        below = (Rank.ADVISED, -offer.priority, -layers[-1])
        if not cache.make_room(sum(map(len, gaps)), self._events.now, below=below):
            return False
        hinted, wants = HintedBand(offer.session, []), []
        for n, key in enumerate(offer.keys):
            block = cache.index.get(key)  # what made room may have been a part of it
            lacking = [layer for layer in layers if block is None or block.pages[layer] < 0]
            if not lacking:
                continue
            if len(lacking) > self._node.pool.free:
                break
            if block is None:
                block = cache.new_block(n, offer.session, lacking)
                block.save = Save.BELOW
                cache.enter(block, key)
            else:
                cache.fill(block, lacking)
            block.hinted[lacking] = True
            block.moving += 1
            hinted.blocks.append(block)
            wants.append((key, tuple(lacking)))
        if wants:
            load = self._node.new_load()
            self._node.loads[load] = hinted
            args = (offer.session, self._node.shape.fingerprint, wants, (), offer.priority, self._events.now)
            self._node.store.handle(ev.LoadWanted(load, ev.LoadKind.PREFETCH, *args))
        return True
