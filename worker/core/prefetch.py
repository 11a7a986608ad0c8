"""When and in which order hinted sessions' pieces are loaded into HBM: the lowest band of layers of all sessions first.

A hint with an expected arrival waits in DRAM for half of that time: earlier in HBM, others would evict it before the
request comes. Half, because arrivals scatter around the expected time. More urgent sessions go first (SYMPHONY, section
3.6), then lower bands, then earlier arrivals (3.4). A band displaces only what ranks under it;
without room the cache stays in DRAM. Of layers with a window, only what the request will read is loaded.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from contracts.ids import SessionKey
from contracts.memory.layer_bands import BANDS, layers_of
from contracts.memory.victim_order import Rank
from worker.core.block import NO_PAGE, Block, SaveState
from worker.core.hbm import HbmCache
from worker.core.victims import Limit

#: Maximum number of bands being loaded at a time.
IN_FLIGHT = 4
#: Maximum number of a tenant's offers; those that may begin last are dropped.
MOST_OFFERS = 512
#: Chunks of offers that one `take` looks at, about; the next one goes on.
LOOKS = 8192


@dataclass(slots=True)
class Offer:
    """A hinted session's chunks that the store can bring. Times are monotonic: when it was offered, when its request is
    expected (`offered_s` or earlier if unknown), when the hint ends. band: the next one to load; no_room: the last
    attempt found no room for all of it."""

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
        """When loading into HBM may begin."""
        return (self.offered_s + self.arrival_s) / 2

    @property
    def order(self) -> tuple[int, int, float]:
        """Of offers that are due, the smallest order's next band is loaded first."""
        return self.priority, self.band, self.arrival_s


def in_order(offers: Iterable[Offer], now: float, waits: Callable[[Offer], bool]) -> Iterator[Offer]:
    """Again and again the offer whose next band is loaded first, of those that are due. The caller raises its band;
    `waits` is asked afterwards whether it comes again."""
    heap = [(offer.order, number, offer) for number, offer in enumerate(offers) if offer.from_s <= now]
    heapq.heapify(heap)
    while heap:
        _, number, offer = heapq.heappop(heap)
        yield offer
        if waits(offer):
            heapq.heappush(heap, (offer.order, number, offer))


@dataclass(frozen=True, slots=True)
class Band:
    """A band of an offer, with its pages taken. keys, blocks, layers: of each chunk, its key, its block and the layers
    to load."""

    offer: Offer
    number: int
    keys: list[bytes]
    blocks: list[Block]
    layers: list[list[int]]


class Offers:
    """Hinted sessions that are not fully loaded: waiting for their next band, or stalled without room.

    Invariants: a session is `waiting` or `stalled`, never both; `_starts` has when each that is waiting may begin.
    """

    def __init__(self, cache: HbmCache, bands: int = BANDS) -> None:
        self._cache = cache
        self._layers = cache.pool.layers
        self._bands = min(bands, self._layers)
        self.waiting: dict[SessionKey, Offer] = {}
        self.stalled: dict[SessionKey, Offer] = {}
        self._starts: list[tuple[float, SessionKey]] = []  #: a heap, with outdated entries

    def put(self, offer: Offer) -> None:
        """Add a hint; it replaces an older one of the session. Of a tenant with too many, one is dropped."""
        self.stalled.pop(offer.session, None)
        self.waiting[offer.session] = offer
        self._await(offer)
        if len(self.waiting) + len(self.stalled) > MOST_OFFERS:
            offers = (*self.waiting.values(), *self.stalled.values())
            mine = [each for each in offers if each.session.tenant == offer.session.tenant]
            if len(mine) > MOST_OFFERS:
                self.forget(max(mine, key=lambda each: each.from_s).session)

    def get(self, session: SessionKey) -> Offer | None:
        """The session's offer, until all of it has been requested."""
        return self.waiting.get(session) or self.stalled.get(session)

    def forget(self, session: SessionKey) -> None:
        """Request no more of this session: its request is here, or the hint is void."""
        self.waiting.pop(session, None)
        self.stalled.pop(session, None)

    def stall(self, session: SessionKey) -> None:
        """The room is needed by a more important request: wait for free memory."""
        if (offer := self.waiting.pop(session, None)) is not None:
            self.stalled[session] = offer

    def try_again(self) -> None:
        """Memory may have become free or purgeable: retry stalled offers."""
        self.waiting |= self.stalled
        for offer in self.stalled.values():
            self._await(offer)
        self.stalled.clear()

    def clear(self) -> None:
        """The store is gone: drop all offers."""
        self.waiting.clear()
        self.stalled.clear()
        self._starts.clear()

    def due_s(self) -> float:
        """When the next band may be requested; infinite: not without an event."""
        while self._starts:
            from_s, session = self._starts[0]
            if (offer := self.waiting.get(session)) is not None and offer.from_s == from_s:
                return from_s
            heapq.heappop(self._starts)
        return math.inf

    def _due(self, now: float) -> Iterator[Offer]:
        if self.due_s() > now:
            return iter(())
        return in_order(self.waiting.values(), now, lambda offer: offer.session in self.waiting)

    def _await(self, offer: Offer) -> None:
        heapq.heappush(self._starts, (offer.from_s, offer.session))
        if len(self._starts) > 2 * len(self.waiting) + 64:
            self._starts = [(each.from_s, session) for session, each in self.waiting.items()]
            heapq.heapify(self._starts)

    def next_arrival_s(self, now: float) -> float:
        """When the next request of these hints is expected; infinite: none."""
        offers = (*self.waiting.values(), *self.stalled.values())
        return min((offer.arrival_s for offer in offers if offer.expires_s > now), default=math.inf)

    def unasked(self, offer: Offer) -> int:
        """Pages of the offer that were not requested and are not in HBM."""
        every = range(layers_of(offer.band, self._layers, self._bands).start, self._layers)
        passed, few = self._passed(offer, every)
        gaps = (_gaps(self._cache.index.get(key), few if i < passed else every) for i, key in enumerate(offer.keys))
        return sum(map(len, gaps))

    def take(self, now: float) -> Band | None:
        """Take pages, marked as hinted, for the next incomplete band, or for as many of its first chunks as fit. None:
        nothing can be loaded now, or of very many offers the first were looked at in vain (then `due_s` has passed)."""
        full: dict[str, Limit] = {}  # by tenant: no page below this limit was available a moment ago
        looked = 0
        for offer in self._due(now):
            if offer.expires_s <= now:
                del self.waiting[offer.session]
                continue
            if looked >= LOOKS:
                return None
            looked += len(offer.keys)
            layers = layers_of(offer.band, self._layers, self._bands)
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
        """The part of the band that fits, and whether that is all of it. search: look for room for missing pages."""
        cache = self._cache
        passed, few = self._passed(offer, layers)
        gaps = [_gaps(cache.index.get(key), few if i < passed else layers) for i, key in enumerate(offer.keys)]
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
            lacking = _gaps(block, few if i < passed else layers)  # making room may have purged a part of it
            if not lacking:
                continue
            if len(lacking) > cache.pool.free:
                whole = False
                break
            if block is None:
                block = cache.new_block(i, offer.session, lacking)
                cache.mark(block, SaveState.BELOW)
                cache.enter(block, key)
            else:
                cache.fill(block, lacking)
            cache.hint(block, lacking)
            band.keys.append(key)
            band.blocks.append(block)
            band.layers.append(lacking)
        return (band if band.keys else None), whole

    def _passed(self, offer: Offer, layers: Sequence[int]) -> tuple[int, Sequence[int]]:
        """How many chunks the offer's request will have passed, and which of these layers it reads of them."""
        windowed = self._cache.windowed
        passed = windowed.passed_after(len(offer.keys))
        return passed, [layer for layer in layers if not windowed.layers[layer]] if passed else layers


def _gaps(block: Block | None, layers: Sequence[int]) -> list[int]:
    return list(layers) if block is None else [layer for layer in layers if block.pages[layer] == NO_PAGE]
