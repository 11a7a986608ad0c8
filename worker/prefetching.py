"""Takes advised sessions' cache into HBM before their request comes, as far as there is room nobody better could use.

SYMPHONY, section 3.4: lower layers of all advised sessions first; the engine may purge any of it at any time (case 2); with
no room the cache stays in DRAM and is read layer by layer when the request comes (case 3).
"""

from __future__ import annotations

from contracts.convert import session_from_wire
from contracts.ids import SessionKey
from contracts.v1 import kvstore_pb2
from worker.core.hbm import NO_PAGE, Block, Rank, Save, Standing
from worker.core.prefetch import BANDS, Offer, band_layers, next_offer
from worker.device import Device
from worker.loads import Load

#: Prefetch loads under way at a time.
IN_FLIGHT = 4


class Prefetching:
    """Pending offers and the loads that serve them. Engine thread only."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._offers: dict[SessionKey, Offer] = {}
        self._loads: dict[int, Load] = {}

    def offered(self, message: kvstore_pb2.PrefetchOffer) -> None:
        """The store can bring this session's chunks."""
        d, now = self.device, self.device.clock.now()
        if not d.settings.cooperative or message.fingerprint != d.shape.fingerprint:
            return
        session = session_from_wire(message.session)
        expires = now + max(message.expires_s, 0.001)
        d.cache.standings[session] = Standing(message.priority, expires)
        if len(d.cache.standings) > 10_000:
            stale = [s for s, standing in d.cache.standings.items() if standing.advised_until_s <= now]
            for old in stale or list(d.cache.standings)[:1000]:
                d.cache.standings.pop(old, None)
        self._offers[session] = Offer(session, list(message.keys), message.priority, now + message.arrival_s, expires)
        for key in message.keys:
            block = d.cache.index.get(key)
            if block is not None:
                block.session = session
                block.last_use_s = now

    def withdrawn(self, session: SessionKey) -> None:
        """The advisory was invalidated: what was fetched goes first, what was not fetched is not."""
        self._offers.pop(session, None)
        standing = self.device.cache.standings.setdefault(session, Standing())
        standing.withdrawn = True

    def came_true(self, session: SessionKey) -> None:
        """The request is here: its own load takes over."""
        self._offers.pop(session, None)

    def turn_ended(self, session: SessionKey) -> None:
        """The session is unadvised again, unless a new offer is pending."""
        if session not in self._offers:
            self.device.cache.standings.pop(session, None)

    def store_down(self) -> None:
        """Nothing offered can come."""
        self._offers.clear()

    def pump(self) -> None:
        """Ask for the next bands, as long as loads and room allow."""
        self._loads = {i: load for i, load in self._loads.items() if not load.closed}
        while len(self._loads) < IN_FLIGHT and (offer := next_offer(self._offers.values())) is not None:
            if offer.expires_s <= self.device.clock.now() or not self._ask(offer):
                del self._offers[offer.session]
                continue
            offer.band += 1
            if offer.band >= min(BANDS, self.device.shape.layers):
                del self._offers[offer.session]

    def _ask(self, offer: Offer) -> bool:
        d, now = self.device, self.device.clock.now()
        layers = list(band_layers(offer.band, d.shape.layers))
        missing = sum(len(self._gaps(d.cache.index.get(key), layers)) for key in offer.keys)
        if not missing:
            return True
        below = (Rank.ADVISED, -offer.priority, -layers[-1])
        if not d.cache.make_room(missing, now, below=below):
            return False
        keys: list[bytes] = []
        blocks: list[Block] = []
        wanted: list[list[int]] = []
        for i, key in enumerate(offer.keys):
            block = d.cache.index.get(key)
            gaps = self._gaps(block, layers)
            if not gaps:
                continue
            if block is None:
                block = d.cache.new_block(i, offer.session, gaps, now)
                block.save = Save.BELOW
                d.cache.enter(block, key)
            else:
                d.cache.fill(block, gaps)
            keys.append(key)
            blocks.append(block)
            wanted.append(gaps)
        load = d.open_load(offer.session, keys, blocks, wanted, kvstore_pb2.PREFETCH, offer.priority, [])
        self._loads[load.load_id] = load
        return True

    @staticmethod
    def _gaps(block: Block | None, layers: list[int]) -> list[int]:
        if block is None:
            return layers
        return [layer for layer in layers if block.pages[layer] == NO_PAGE]
