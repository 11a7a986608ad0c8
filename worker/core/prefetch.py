"""When and in which order advised sessions' pieces are taken into HBM: a band of lowest layers of all, then the next band, ...

A hint that says when its request is expected waits for half of that time, with its cache in DRAM: in HBM it would take room that
others need, who overwrite it before the request comes. Half, as such times are means, and requests scatter around them. More urgent
sessions first (SYMPHONY, section 3.6); those of one priority within a band by expected arrival (DESIGN section 6; 3.4). A band
displaces what ranks under it, and no more: with no room the cache stays in DRAM.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from contracts.ids import SessionKey
from worker.core.hbm import NO_PAGE, Block, HbmCache, Save
from worker.core.standings import Rank
from worker.core.victims import Limit

#: Layers are asked for in this many bands: one request a band, so that a load is worth its message.
BANDS = 4
#: Loads of bands that are under way at a time.
IN_FLIGHT = 4


@dataclass(slots=True)
class Offer:
    """An advised session's chunks that the store can bring. Times are monotonic: when it was offered, when its request is expected (not
    after that: nobody knows), when the hint ends. `band` is the next one to ask for; no_room: it was tried in vain."""

    session: SessionKey
    keys: list[bytes]
    priority: int
    offered_s: float
    arrival_s: float
    expires_s: float
    band: int = 0
    no_room: bool = False

    @property
    def from_s(self) -> float:
        """When HBM may be filled."""
        return (self.offered_s + self.arrival_s) / 2


def next_offer(offers: Iterable[Offer], now: float) -> Offer | None:
    """The offer whose next band goes first; None: there is none whose time has come."""
    return min((o for o in offers if o.from_s <= now), key=lambda o: (o.priority, o.band, o.arrival_s), default=None)


def band_layers(band: int, layers: int, bands: int = BANDS) -> range:
    """The layers of a band, of `bands` or as many as there are layers."""
    count = min(bands, layers)
    return range(band * layers // count, (band + 1) * layers // count)


@dataclass(frozen=True, slots=True)
class Band:
    """A band of an offered session whose pages have been taken: chunks by key, their blocks, and of each the layers to bring."""

    offer: Offer
    number: int
    keys: list[bytes]
    blocks: list[Block]
    layers: list[list[int]]


class Offers:
    """Sessions that are coming: those whose next band is to be asked for, and those that found no room.

    Invariant: a session is `waiting` or `stalled`, never both.
    """

    def __init__(self, cache: HbmCache, bands: int = BANDS) -> None:
        self._cache = cache
        self._layers = cache.pool.layers
        self._bands = min(bands, self._layers)
        self.waiting: dict[SessionKey, Offer] = {}
        self.stalled: dict[SessionKey, Offer] = {}

    def put(self, offer: Offer) -> None:
        """A hint came; it replaces an older one."""
        self.stalled.pop(offer.session, None)
        self.waiting[offer.session] = offer

    def get(self, session: SessionKey) -> Offer | None:
        """The session's, as long as not all of it has been asked for."""
        return self.waiting.get(session) or self.stalled.get(session)

    def forget(self, session: SessionKey) -> None:
        """Its request is here, or its hint is void: no more of it is asked for."""
        self.waiting.pop(session, None)
        self.stalled.pop(session, None)

    def stall(self, session: SessionKey) -> None:
        """Somebody better needs the room."""
        if (offer := self.waiting.pop(session, None)) is not None:
            self.stalled[session] = offer

    def try_again(self) -> None:
        """Memory may have become free, or free to be purged: those that found no room are looked at once more."""
        self.waiting |= self.stalled
        self.stalled.clear()

    def clear(self) -> None:
        """Nothing offered can come."""
        self.waiting.clear()
        self.stalled.clear()

    def due_s(self) -> float:
        """When the next band may be asked for; infinite: not without an event."""
        return min((offer.from_s for offer in self.waiting.values()), default=math.inf)

    def unasked(self, offer: Offer) -> int:
        """Pages of it that were not asked for and are not here."""
        every = range(offer.band * self._layers // self._bands, self._layers)
        return sum(len(_gaps(self._cache.index.get(key), every)) for key in offer.keys)

    def take(self, now: float) -> Band | None:
        """Pages for the next band that lacks some and that there is room for, or for as many of its first chunks as there is room for:
        they are marked as hinted, and whoever asks for their bytes says so. None: there is nothing to ask for now."""
        full: dict[str, Limit] = {}  # by tenant: nothing that ranks under this could be had a moment ago
        while (offer := next_offer(self.waiting.values(), now)) is not None:
            if offer.expires_s <= now:
                del self.waiting[offer.session]
                continue
            layers = band_layers(offer.band, self._layers, self._bands)
            below = (Rank.ADVISED, -offer.priority, -layers[-1])
            tenant = offer.session.tenant
            band, whole = self._take(offer, layers, below, now, search=tenant not in full or below > full[tenant])
            offer.no_room = not whole
            if whole:
                offer.band += 1
                if offer.band >= self._bands:
                    del self.waiting[offer.session]
            else:
                self.stall(offer.session)
                if band is None:
                    full[tenant] = max(below, full.get(tenant, below))
            if band is not None:
                return band
        return None

    def _take(self, offer: Offer, layers: range, below: Limit, now: float, *, search: bool) -> tuple[Band | None, bool]:
        """The band, as far as there is room; and whether that is all of it. search: there may be room for a part that is not here."""
        cache = self._cache
        gaps = [_gaps(cache.index.get(key), layers) for key in offer.keys]
        missing = sum(map(len, gaps))
        if not missing or not search:
            return None, not missing
        count, whole = len(gaps), True
        if not cache.make_room(missing, now, below, offer.session.tenant):
            room, count, whole = cache.room(now, below, offer.session.tenant), 0, False
            while count < len(gaps) and (room := room - len(gaps[count])) >= 0:
                count += 1
            if not any(gaps[:count]):
                return None, False
            cache.make_room(sum(map(len, gaps[:count])), now, below, offer.session.tenant)
        band = Band(offer, offer.band, [], [], [])
        for i, key in enumerate(offer.keys[:count]):
            block = cache.index.get(key)
            lacking = _gaps(block, layers)  # what made room may have been a part of it
            if not lacking:
                continue
            if len(lacking) > cache.pool.free:
                whole = False
                break
            if block is None:
                block = cache.new_block(i, offer.session, lacking)
                cache.mark(block, Save.BELOW)
                cache.enter(block, key)
            else:
                cache.fill(block, lacking)
            cache.hint(block, lacking)
            band.keys.append(key)
            band.blocks.append(block)
            band.layers.append(lacking)
        return (band if band.keys else None), whole


def _gaps(block: Block | None, layers: range) -> list[int]:
    return list(layers) if block is None else [layer for layer in layers if block.pages[layer] == NO_PAGE]
