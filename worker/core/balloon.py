"""Divides a device's memory among its models' KV (Prism, section 5.2: elastic memory).

Each model's pool has a limit, which only this module moves. A model that is short of pages gets, in this order: memory
within no model's limit; unused parts of other limits; frozen layers of the trainer (`worker.core.loan`); pages of
caches, its own and others', that are worth least (`worker.core.victims`); the rest of other caches; all that the
trainer has; memory of layers (`worker.core.remap`); and at last it preempts less urgent sequences of other models.
Pages in use move only within their model's memory, to empty slabs (`worker.core.consolidating`). docs/design/0035 says
why a model's own cached pages do not always come first.

A model within its part (an equal share of the memory among those used lately) loses cached pages only when nothing
else is left, so one model's flood does not empty the others' caches.

Invariant (`validate`): limits, or what is used beyond them, and weights together are at most the device. So a pool's
free pages can always be mapped, once the pools' `to_unmap` are unmapped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

from contracts.memory.victim_order import Standing
from worker.core.hbm import HbmCache
from worker.core.loan import Loan
from worker.core.supply import Lent
from worker.core.victims import KEPT_S

#: With more than 1 / this of the device unused, a pool grows by a slab more for each band, so that bands do not mix.
_AMPLE = 8


class YieldRank(NamedTuple):
    """Of two sequences of a device, the later in this order gives up its pages. first: its model decides between equal
    ones, so that they never wait for each other."""

    priority: int
    arrival_s: float
    first: bool = False


class Yields(Protocol):
    """The sequences of a model on the device (`EngineCore`)."""

    def displaceable(self, rank: YieldRank) -> int:
        """Pages held by sequences that rank after `rank`."""
        ...

    def yield_to(self, now: float, rank: YieldRank, pages: int) -> bool:
        """Preempt one of them for so many pages. False if none can be, or pages come without."""
        ...

    def consolidate(self, slabs: int, now: float) -> None:
        """Empty up to so many slabs by moving pages to others, and by purging cached ones of least worth."""
        ...


class Balloon:
    """A device of `granules`, and the shares of its models."""

    def __init__(self, granules: int) -> None:
        self.granules = granules
        self.shares: list[Share] = []
        #: Of the device's trainer.
        self.loan = Loan()
        #: Requests after this rank get no memory: what running ones free is for weights. None: there is no such rank.
        self.held: tuple[float, ...] | None = None
        #: Granules of idle models' weights that KV of this share may have; and unloads them until `spare` is so many.
        self.idle_weights: Callable[[Share], int] = lambda share: 0
        self.unload_idle: Callable[[Share, int], object] = lambda share, granules: None
        #: Lends memory of a layer to this share, which lacks it until so many granules are spare.
        self.lend: Callable[[Share, int, float], Lent] = lambda share, granules, now: Lent.NEVER

    def join(self, name: str, cache: HbmCache, slab_granules: int, priority: int = 0) -> Share:
        """A model's share, with a limit of 0, made its cache's supply. priority: the model with the greatest number
        gives up memory first."""
        share = Share(self, name, cache, slab_granules, priority)
        self.shares.append(share)
        cache.pool.set_limit(0)
        cache.supply = share
        self.limits_changed()
        return share

    def limits_changed(self) -> None:
        """Tell the pools what they can reach beside the weights that are here."""
        rest = self.granules - sum(share.weights for share in self.shares)
        for share in self.shares:
            share.pool.reach = min(rest // share.slab_granules, share.pool.slab_count)

    @property
    def spare(self) -> int:
        """Granules within no limit."""
        return self.granules - sum(share.total for share in self.shares) - self.loan.held

    @property
    def waiting(self) -> bool:
        """Whether a request waits for memory."""
        return any(share.waiting for share in self.shares)

    @property
    def obtainable(self) -> int:
        """Granules that `collect` could find. An estimate: some cached pages lie in slabs that are in use."""
        return self.spare + self.loan.held + sum(share.idle + share.cached_granules for share in self.shares)

    def collect(self, granules: int, now: float) -> bool:
        """Make so many granules spare, of unused memory and all caches: for weights (D1 of the paper: in one event all
        limits shrink). False if there is not enough; caches were purged all the same."""
        for share in self.shares:
            share.give_up(granules - self.spare)
        self.loan.give(granules - self.spare)
        for share in sorted(self.shares, key=lambda share: (-share.priority, share.cache.standings.latest_s)):
            if self.spare >= granules:
                break
            share.give_cached(granules - self.spare, now)
        self.end_loan(granules)
        return self.spare >= granules

    def end_loan(self, granules: int, others: int = 0) -> None:
        """Take all that the trainer has, if so many granules are then spare, with what others give."""
        if self.spare < granules <= self.spare + self.loan.held + others:
            self.loan.end()

    def in_use(self, now: float) -> int:
        """Number of models used lately, at least 1."""
        return max(sum(share.is_in_use(now) for share in self.shares), 1)

    def validate(self) -> None:
        """Raise AssertionError when the invariant does not hold."""
        assert self.spare >= 0, f"limits exceed the device: {self.spare} granules"
        self.loan.validate()


class Share:
    """One model's part, in granules; the `Supply` of its cache. weights: of its weights, on the device or on their
    way."""

    def __init__(self, balloon: Balloon, name: str, cache: HbmCache, slab_granules: int, priority: int) -> None:
        self._balloon, self.name, self.cache, self.pool = balloon, name, cache, cache.pool
        self.slab_granules, self.priority = slab_granules, priority
        self.weights = 0
        self.yields: Yields | None = None
        #: Rank of the request that waits for memory, if any (`arbitration.Order.memory_rank`).
        self._waiting: tuple[float, ...] | None = None

    # ---- what it has -------------------------------------------------------------------------------------------
    @property
    def total(self) -> int:
        """Granules of its weights, and of its limit or what it uses beyond."""
        return max(self.pool.limit, self.pool.used) * self.slab_granules + self.weights

    @property
    def idle(self) -> int:
        """Granules of its limit without a page."""
        return max(self.pool.limit - self.pool.used, 0) * self.slab_granules

    @property
    def cached_granules(self) -> int:
        """Granules that its cache can give, if pages in use fill as few slabs as they can."""
        in_use = math.ceil((self.pool.taken - self.cache.cached) / self.pool.pages_per_slab)
        return max(self.pool.used - in_use, 0) * self.slab_granules

    @property
    def waiting(self) -> bool:
        """Whether a request of this model waits for memory."""
        return self._waiting is not None

    def is_in_use(self, now: float) -> bool:
        """Whether a request or hint used it lately."""
        return now - self.cache.standings.latest_s <= KEPT_S

    def _within_part(self, now: float) -> bool:
        used = self.pool.used * self.slab_granules
        return self.is_in_use(now) and used * self._balloon.in_use(now) <= self._balloon.granules

    # ---- what it gives -----------------------------------------------------------------------------------------
    def give_up(self, granules: int) -> None:
        """Lower the limit by up to so many granules without a page."""
        slabs = -(-min(granules, self.idle) // self.slab_granules)
        if slabs > 0:
            self.pool.set_limit(self.pool.limit - slabs)

    def give_cached(self, granules: int, now: float, under: Standing | None = None) -> None:
        """Purge the cache for up to so many granules, and give them up; where pages in use lie in the way, they move.
        under: only what ranks under it; nothing moves."""
        left = self.total - granules
        self.cache.empty_slabs(-(-granules // self.slab_granules), now, under)
        self.give_up(granules)
        if under is None and self.yields is not None and self.total > left:
            self.yields.consolidate(-(-(self.total - left) // self.slab_granules), now)
            self.give_up(self.total - left)

    # ---- what it gets: `Supply` --------------------------------------------------------------------------------
    def unused(self) -> int:
        """See `Supply.unused`."""
        balloon = self._balloon
        found = balloon.spare + balloon.loan.loose + sum(other.idle for other in self._others())
        return self._pages(min(found, self._room))

    def cached(self) -> int:
        """See `Supply.cached`."""
        balloon = self._balloon
        found = sum(other.cached_granules for other in self._others()) + balloon.idle_weights(self)
        found += balloon.loan.held - balloon.loan.loose
        return self._pages(min(found, self._room))

    def grow(self, pages: int) -> None:
        """See `Supply.grow`."""
        if pages <= 0:
            return
        wanted, balloon = self._granules(pages), self._balloon
        if balloon.spare - wanted > balloon.granules // _AMPLE:
            self._raise(wanted + self.pool.bands * self.slab_granules)
            return
        for other in self._others():
            other.give_up(wanted - balloon.spare)
        balloon.loan.give(wanted - balloon.spare)
        self._raise(wanted)

    def purge(self, pages: int, now: float, under: Standing | None = None) -> None:
        """See `Supply.purge`. Models that give up memory before this one rank under everything."""
        if pages <= 0:
            return
        wanted = self._granules(pages)
        for other in sorted(self._others(), key=lambda other: (-other.priority, other.cache.standings.latest_s)):
            short, first = wanted - self._balloon.spare, other.priority > self.priority
            if short <= 0:
                break
            if not other.cached_granules or (
                under is not None and not first and (other.priority < self.priority or other._within_part(now))
            ):
                continue
            other.give_cached(short, now, None if first else under)
        if under is None and self._balloon.spare < wanted:
            self._balloon.end_loan(wanted, self._balloon.idle_weights(self))
            self._balloon.unload_idle(self, wanted)
        self._raise(wanted)

    def lend(self, pages: int, now: float) -> Lent:
        """See `Supply.lend`."""
        wanted = self._granules(pages)
        if pages <= 0 or self._room < wanted:
            return Lent.NEVER
        if (lent := self._balloon.lend(self, wanted, now)) is Lent.NOW:
            self._raise(wanted)
        return lent

    def waits(self, rank: tuple[float, ...] | None) -> None:
        """See `Supply.waits`."""
        self._waiting = rank

    def comes_first(self, rank: tuple[float, ...]) -> bool:
        """See `Supply.comes_first`. So that memory which one model frees for a request is not taken by another."""
        firsts = (self._balloon.held, *(other._waiting for other in self._others()))
        return any(first is not None and first < rank for first in firsts)

    def displace(self, now: float, priority: int, arrival_s: float, pages: int) -> bool:
        """See `Supply.displace`."""
        wanted, shares = self._granules(pages), self._balloon.shares
        ranks = {
            other: YieldRank(priority, arrival_s, shares.index(self) < number)
            for number, other in enumerate(shares)
            if other is not self and other.yields
        }
        held = {
            other: other._granules(other.yields.displaceable(rank)) for other, rank in ranks.items() if other.yields
        }
        coming = sum(other._granules(other.cache.coming()) for other in held)
        if pages <= 0 or coming >= wanted or sum(held.values()) + coming < wanted:
            return False
        for other in sorted(held, key=lambda other: (-other.priority, -held[other])):
            if held[other] and other.yields and other.yields.yield_to(now, ranks[other], other._pages(wanted)):
                return True
        return False

    def _others(self) -> list[Share]:
        return [share for share in self._balloon.shares if share is not self]

    @property
    def _room(self) -> int:
        """Granules by which the limit may rise in its address space."""
        return (self.pool.slab_count - max(self.pool.limit, self.pool.used)) * self.slab_granules

    def _raise(self, granules: int) -> None:
        """Raise the limit by so many granules, or as far as memory and address space reach."""
        slabs = min(granules, self._balloon.spare, self._room) // self.slab_granules
        if slabs > 0:
            self.pool.set_limit(max(self.pool.limit, self.pool.used) + slabs)

    def _granules(self, pages: int) -> int:
        return math.ceil(pages / self.pool.pages_per_slab) * self.slab_granules

    def _pages(self, granules: int) -> int:
        return granules // self.slab_granules * self.pool.pages_per_slab
