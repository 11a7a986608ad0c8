"""Takes advised sessions' cache into HBM before their request comes, as far as there is room nobody better could use.

SYMPHONY, section 3.4: lower layers of all advised sessions first; the engine may purge any of it at any time (case 2); with
no room the cache stays in DRAM and is read layer by layer when the request comes (case 3).

Invariant: no sequence waits for a load of a hint (`give_way_to`). What is asked for next is decided in `worker.core.prefetch`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from contracts.ids import SessionKey
from worker.core.events import Offered
from worker.core.hbm import Block
from worker.core.load import Load
from worker.core.prefetch import BANDS, IN_FLIGHT, Band, Offer, Offers
from worker.core.state import CoreState


@dataclass(frozen=True, slots=True)
class _Fetch:
    load: Load
    band: Band


class Prefetching:
    """Pending offers and the loads that serve them."""

    def __init__(self, state: CoreState) -> None:
        self.state = state
        #: Hinted pages that had not come when their request did, and those that there was no room for until then.
        self.late = self.no_room = 0
        self._offers = Offers(state.cache, BANDS if state.policy.layer_priority else 1)
        self._fetches: list[_Fetch] = []

    # ---- hints -------------------------------------------------------------------------------------------------
    def offered(self, message: Offered) -> None:
        """The store can bring this session's chunks."""
        d, now, session = self.state, self.state.now, message.session
        expires = now + max(message.expires_s, 0.001)
        d.cache.standings.advise(session, message.priority, expires, now)
        for key in message.keys:
            block = d.cache.index.get(key)
            if block is not None:
                d.cache.want(block, session)
        if d.policy.cooperative:
            self._offers.put(Offer(session, list(message.keys), message.priority, now, now + message.arrival_s, expires))

    def withdrawn(self, session: SessionKey) -> None:
        """The advisory was invalidated: what was fetched goes first, what was not fetched is not."""
        self._offers.forget(session)
        self.state.cache.standings.withdraw(session)
        self._abort([f for f in self._fetches if f.band.offer.session == session])

    def came_true(self, session: SessionKey) -> None:
        """The request is here: its own load takes over."""
        self.state.cache.standings.came(session, self.state.now)
        if (offer := self._offers.get(session)) is not None:
            if offer.no_room:
                self.no_room += self._offers.unasked(offer)
            else:
                self.late += self._offers.unasked(offer)
        self._offers.forget(session)

    def turn_ended(self, session: SessionKey) -> None:
        """The session is unadvised again, unless a new hint came; and there may be room for others."""
        self.state.cache.standings.ended(session, self.state.now)
        self.try_again()

    def try_again(self) -> None:
        """Memory may have become free, or free to be purged: hints that found no room are looked at once more."""
        self._offers.try_again()

    def store_down(self) -> None:
        """Nothing offered can come."""
        self._offers.clear()

    @property
    def stalled(self) -> int:
        """Hinted sessions that wait for room in HBM."""
        return len(self._offers.stalled)

    @property
    def due(self) -> bool:
        """`pump` has something to try."""
        return self.due_in_s <= 0

    @property
    def due_in_s(self) -> float:
        """Seconds until it is due; infinite: not without an event."""
        open_ = sum(not fetch.load.closed for fetch in self._fetches)
        return self._offers.due_s() - self.state.now if open_ < IN_FLIGHT else math.inf

    # ---- giving way --------------------------------------------------------------------------------------------
    def give_way_to(self, blocks: list[Block]) -> list[SessionKey]:
        """A request uses these blocks from now on: what is on its way into them for a hint is the request's to ask for.

        Mutates the blocks: pages that have not come are gone. The store goes on with reads that it has begun, so that no piece is
        read twice. Returns whose loads were given up.
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
        """The request that their loads gave way to waits all the same: they wait too, until memory may have become free."""
        for session in sessions:
            self._offers.stall(session)

    def give_up_one(self) -> bool:
        """A request needs memory: give up the least urgent load of the highest layers. False when no load of a hint is under way."""
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
                offer.band = min(offer.band, fetch.band.number)  # what it had brought is skipped when it is its turn again
        self._fetches = [f for f in self._fetches if f not in fetches]

    # ---- fetching ----------------------------------------------------------------------------------------------
    def pump(self) -> bool:
        """Ask for the next bands, as long as loads and room allow. Returns whether anything was asked for."""
        self._fetches = [f for f in self._fetches if not f.load.closed]
        d, now, asked = self.state, self.state.now, False
        while len(self._fetches) < IN_FLIGHT and (band := self._offers.take(now)) is not None:
            offer = band.offer
            asked = True
            load = d.open_load(offer.session, band.keys, band.blocks, band.layers, hint=True, priority=offer.priority, source_nodes=[])
            self._fetches.append(_Fetch(load, band))
        return asked
