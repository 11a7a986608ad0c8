"""Takes advised sessions' cache into HBM before their request comes, as far as there is room nobody better could use.

SYMPHONY, section 3.4: lower layers of all advised sessions first; the engine may purge any of it at any time (case 2); with
no room the cache stays in DRAM and is read layer by layer when the request comes (case 3).

Invariants: no sequence waits for a load of a hint (`give_way_to`); a session is in `_offers` or in `_stalled`, never in both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from contracts.convert import session_from_wire
from contracts.ids import SessionKey
from contracts.v1 import kvstore_pb2
from worker.core.hbm import NO_PAGE, Block, Save
from worker.core.prefetch import BANDS, Offer, band_layers, next_offer
from worker.core.standings import Rank
from worker.device import Device
from worker.loads import Load

#: Prefetch loads under way at a time.
IN_FLIGHT = 4


@dataclass(frozen=True, slots=True)
class _Fetch:
    load: Load
    offer: Offer
    band: int


class Prefetching:
    """Pending offers and the loads that serve them. Engine thread only."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.bands = min(BANDS, device.shape.layers) if device.settings.layer_priority else 1
        #: Hinted pages that had not come when their request did, and those that there was no room for until then.
        self.late = self.no_room = 0
        self._offers: dict[SessionKey, Offer] = {}
        self._stalled: dict[SessionKey, Offer] = {}
        self._fetches: list[_Fetch] = []

    # ---- hints -------------------------------------------------------------------------------------------------
    def offered(self, message: kvstore_pb2.PrefetchOffer) -> None:
        """The store can bring this session's chunks."""
        d, now = self.device, self.device.clock.now()
        if message.fingerprint != d.shape.fingerprint:
            return
        session = session_from_wire(message.session)
        expires = now + max(message.expires_s, 0.001)
        d.cache.standings.advise(session, message.priority, expires, now)
        for key in message.keys:
            block = d.cache.index.get(key)
            if block is not None:
                d.cache.want(block, session)
        if d.settings.cooperative:
            self._stalled.pop(session, None)
            self._offers[session] = Offer(session, list(message.keys), message.priority, now, now + message.arrival_s, expires)

    def withdrawn(self, session: SessionKey) -> None:
        """The advisory was invalidated: what was fetched goes first, what was not fetched is not."""
        self._forget(session)
        self.device.cache.standings.withdraw(session)
        self._abort([f for f in self._fetches if f.offer.session == session])

    def came_true(self, session: SessionKey) -> None:
        """The request is here: its own load takes over."""
        self.device.cache.standings.came(session, self.device.clock.now())
        if (offer := self._offers.get(session) or self._stalled.get(session)) is not None:
            if offer.no_room:
                self.no_room += self._unasked(offer)
            else:
                self.late += self._unasked(offer)
        self._forget(session)

    def turn_ended(self, session: SessionKey) -> None:
        """The session is unadvised again, unless a new hint came; and there may be room for others."""
        self.device.cache.standings.ended(session, self.device.clock.now())
        self.try_again()

    def try_again(self) -> None:
        """Memory may have become free, or free to be purged: hints that found no room are looked at once more."""
        self._offers |= self._stalled
        self._stalled.clear()

    def store_down(self) -> None:
        """Nothing offered can come."""
        self._offers.clear()
        self._stalled.clear()

    @property
    def stalled(self) -> int:
        """Hinted sessions that wait for room in HBM."""
        return len(self._stalled)

    @property
    def due(self) -> bool:
        """`pump` has something to try."""
        return self.due_in_s <= 0

    @property
    def due_in_s(self) -> float:
        """Seconds until it is due; infinite: not without an event."""
        if not self._offers or len(self._fetches) >= IN_FLIGHT:
            return math.inf
        return min(o.from_s for o in self._offers.values()) - self.device.clock.now()

    def _forget(self, session: SessionKey) -> None:
        self._offers.pop(session, None)
        self._stalled.pop(session, None)

    # ---- giving way --------------------------------------------------------------------------------------------
    def give_way_to(self, blocks: list[Block]) -> None:
        """A request uses these blocks from now on: what is on its way into them for a hint is the request's to ask for.

        Mutates the blocks: pages that have not come are gone. The store goes on with reads that it has begun, so that no piece is
        read twice.
        """
        wanted = {id(block) for block in blocks if block.moving and not block.complete}
        overtaken = [f for f in self._fetches if wanted and any(id(b) in wanted for b in f.load.blocks)]
        self.late += sum(
            not block.ready[layer]
            for f in overtaken
            for block, layers in zip(f.load.blocks, f.load.layers, strict=True)
            for layer in layers
            if id(block) in wanted
        )
        self._abort(overtaken)

    def give_up_one(self) -> bool:
        """A request needs memory: give up the least urgent load of the highest layers. False when no load of a hint is under way."""
        self._fetches = [f for f in self._fetches if not f.load.closed]
        if not self._fetches or self.device.cache.hold_hinted:
            return False
        last = max(self._fetches, key=lambda f: (f.offer.priority, f.band))
        self._abort([last])
        if (offer := self._offers.pop(last.offer.session, None)) is not None:
            self._stalled[offer.session] = offer
        return True

    def _abort(self, fetches: list[_Fetch]) -> None:
        for fetch in fetches:
            if fetch.load.closed:
                continue
            self.device.abort_load(fetch.load)
            offer = self._offers.get(fetch.offer.session) or self._stalled.get(fetch.offer.session)
            if offer is not None:
                offer.band = min(offer.band, fetch.band)  # what it had brought is skipped when it is its turn again
        self._fetches = [f for f in self._fetches if f not in fetches]

    # ---- fetching ----------------------------------------------------------------------------------------------
    def pump(self) -> None:
        """Ask for the next bands, as long as loads and room allow."""
        self._fetches = [f for f in self._fetches if not f.load.closed]
        now = self.device.clock.now()
        while len(self._fetches) < IN_FLIGHT and (offer := next_offer(self._offers.values(), now)) is not None:
            if offer.expires_s <= now:
                del self._offers[offer.session]
                continue
            offer.no_room = not self._ask(offer)
            if offer.no_room:
                self._stalled[offer.session] = self._offers.pop(offer.session)
            else:
                offer.band += 1
                if offer.band >= self.bands:
                    del self._offers[offer.session]

    def _ask(self, offer: Offer) -> bool:
        """Ask for the offer's band, as many of its first chunks as there is room for. False when that is not all of them."""
        d, now = self.device, self.device.clock.now()
        layers = list(band_layers(offer.band, d.shape.layers, self.bands))
        gaps = [self._gaps(d.cache.index.get(key), layers) for key in offer.keys]
        missing = sum(map(len, gaps))
        if not missing:
            return True
        below = (Rank.ADVISED, -offer.priority, -layers[-1])
        count, whole = len(gaps), True
        if not d.cache.make_room(missing, now, below=below):
            room, count, whole = d.cache.room(now, below), 0, False
            while count < len(gaps) and sum(map(len, gaps[: count + 1])) <= room:
                count += 1
            if not any(gaps[:count]):
                return False
            d.cache.make_room(sum(map(len, gaps[:count])), now, below=below)
            # What made room may have been a gap of this offer's own: looked up again below.
        keys: list[bytes] = []
        blocks: list[Block] = []
        wanted: list[list[int]] = []
        for i, key in enumerate(offer.keys[:count]):
            block = d.cache.index.get(key)
            gaps_now = self._gaps(block, layers)
            if not gaps_now:
                continue
            if len(gaps_now) > d.cache.pool.free:
                whole = False
                break
            if block is None:
                block = d.cache.new_block(i, offer.session, gaps_now)
                block.save = Save.BELOW
                d.cache.enter(block, key)
            else:
                d.cache.fill(block, gaps_now)
            block.hinted[gaps_now] = True
            keys.append(key)
            blocks.append(block)
            wanted.append(gaps_now)
        if keys:
            load = d.open_load(offer.session, keys, blocks, wanted, kvstore_pb2.PREFETCH, offer.priority, [])
            self._fetches.append(_Fetch(load, offer, offer.band))
        return whole

    def _unasked(self, offer: Offer) -> int:
        layers = [layer for band in range(offer.band, self.bands) for layer in band_layers(band, self.device.shape.layers, self.bands)]
        return sum(len(self._gaps(self.device.cache.index.get(key), layers)) for key in offer.keys)

    @staticmethod
    def _gaps(block: Block | None, layers: list[int]) -> list[int]:
        if block is None:
            return layers
        return [layer for layer in layers if block.pages[layer] == NO_PAGE]
