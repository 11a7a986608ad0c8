"""Loads hinted sessions' cache into HBM before their requests come, into room that nothing more important needs.

SYMPHONY, section 3.4: lower layers of all hinted sessions first; the engine may purge any of it at any time (case 2);
without room the cache stays in DRAM and is loaded layer by layer when the request comes (case 3).

Invariant: no sequence waits for a load of a hint (`give_way_to`). The order is in `worker.core.prefetch`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from contracts.ids import SessionKey
from contracts.memory.layer_bands import BANDS
from worker.core.block import Block
from worker.core.events import Offered
from worker.core.load import Load
from worker.core.prefetch import IN_FLIGHT, Band, Offer, Offers
from worker.core.state import CoreState


@dataclass(frozen=True, slots=True)
class _Fetch:
    load: Load
    band: Band


class Prefetching:
    """Pending offers and the loads that serve them."""

    def __init__(self, state: CoreState) -> None:
        self.state = state
        #: Hinted pages that were not loaded when their request came: too late, or for lack of room.
        self.late = self.no_room = 0
        self._offers = Offers(state.cache, BANDS if state.policy.layer_priority else 1)
        self._fetches: list[_Fetch] = []

    # ---- hints -------------------------------------------------------------------------------------------------
    def offered(self, message: Offered) -> None:
        """The store can bring this session's chunks."""
        d, now, session = self.state, self.state.now, message.session
        expires = now + max(message.expires_s, 0.001)
        d.cache.standings.advise(session, message.priority, expires, now)
        if d.cache.windowed.tokens:
            d.cache.standings.passes(session, d.cache.windowed.passed_after(len(message.keys)))
        for key in message.keys:
            block = d.cache.index.get(key)
            if block is not None:
                d.cache.want(block, session)
        if d.policy.cooperative:
            self._offers.put(
                Offer(session, list(message.keys), message.priority, now, now + message.arrival_s, expires)
            )

    def withdrawn(self, session: SessionKey) -> None:
        """The advisory was invalidated: stop loading; loaded pages become the first victims."""
        self._offers.forget(session)
        self.state.cache.standings.withdraw(session)
        self._abort([f for f in self._fetches if f.band.offer.session == session])

    def came_true(self, session: SessionKey) -> None:
        """The request is here; its own load takes over."""
        self.state.cache.standings.came(session, self.state.now)
        if (offer := self._offers.get(session)) is not None:
            if offer.no_room:
                self.no_room += self._offers.unasked(offer)
            else:
                self.late += self._offers.unasked(offer)
        self._offers.forget(session)

    def turn_ended(self, session: SessionKey) -> None:
        """A turn ended: the session is unadvised, unless a new hint came. Retries other hints."""
        self.state.cache.standings.ended(session, self.state.now)
        self.try_again()

    def try_again(self) -> None:
        """Memory may have become free or purgeable: retry hints that found no room."""
        self._offers.try_again()

    def store_down(self) -> None:
        """The store is gone: drop all hints' offers."""
        self._offers.clear()

    @property
    def stalled(self) -> int:
        """Number of hinted sessions that wait for room in HBM."""
        return len(self._offers.stalled)

    def next_arrival_s(self, now: float) -> float:
        """When the next hinted request is expected; infinite if there is none."""
        return self._offers.next_arrival_s(now)

    @property
    def due(self) -> bool:
        """Whether `pump` has something to try."""
        return self.due_in_s <= 0

    @property
    def due_in_s(self) -> float:
        """Seconds until `due`; infinite: not without an event."""
        open_ = sum(not fetch.load.closed for fetch in self._fetches)
        return self._offers.due_s() - self.state.now if open_ < IN_FLIGHT else math.inf

    # ---- giving way --------------------------------------------------------------------------------------------
    def give_way_to(self, blocks: list[Block]) -> list[SessionKey]:
        """A request will use these blocks: abort hints' loads into them, so that the request can load the pieces
        itself.

        Mutates the blocks: pages not yet filled are freed. The store continues reads that it has begun, so no piece is
        read twice. Returns the sessions whose loads were aborted.
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
        return [fetch.band.offer.session for fetch in overtaken]

    def stall(self, sessions: Iterable[SessionKey]) -> None:
        """The request that displaced these sessions' loads found no room: stall them until memory may be free."""
        for session in sessions:
            self._offers.stall(session)

    def give_up_one(self) -> bool:
        """A request needs memory: abort the least urgent hint's load of the highest band. False if there is none."""
        self._fetches = [f for f in self._fetches if not f.load.closed]
        if not self._fetches or self.state.cache.hold_hinted:
            return False
        last = max(self._fetches, key=lambda f: (f.band.offer.priority, f.band.number))
        self._abort([last])
        self.stall([last.band.offer.session])
        return True

    def _abort(self, fetches: list[_Fetch]) -> None:
        for fetch in fetches:
            if fetch.load.closed:
                continue
            self.state.abort_load(fetch.load)
            offer = self._offers.get(fetch.band.offer.session)
            if offer is not None:
                # pieces that are loaded already are skipped next time
                offer.band = min(offer.band, fetch.band.number)
        self._fetches = [f for f in self._fetches if f not in fetches]

    # ---- fetching ----------------------------------------------------------------------------------------------
    def pump(self) -> bool:
        """Load the next bands while room and the number of loads allow. Returns whether a load was opened."""
        self._fetches = [f for f in self._fetches if not f.load.closed]
        d, now, asked = self.state, self.state.now, False
        while len(self._fetches) < IN_FLIGHT and (band := self._offers.take(now)) is not None:
            offer = band.offer
            asked = True
            load = d.open_load(
                offer.session, band.keys, band.blocks, band.layers, hint=True, priority=offer.priority, source_nodes=[]
            )
            self._fetches.append(_Fetch(load, band))
        return asked
