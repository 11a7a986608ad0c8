"""Whose layers' memory KV gets, and when they get it back (MIRAGE, section 5.1 and algorithm 1).

A request that lacks memory gets that of one layer a round: after caches were purged, before anybody is preempted. Idle
models lend first: the least urgent priority, then the one that was used last, since models that take turns need it
latest. Then the model that asks lends to itself. What a model may lend is in `worker.core.lending`.

A layer a round comes back: at once from models whose steps are too slow, from others when nobody has lacked memory for
`CALM_S`; computing models first, then the one that lent last. Memory for it is unused or cached, and leaves a chunk for
each sequence on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from contracts.models import ModelState
from contracts.residency import WeightsMove, Why
from worker.core.balloon import Balloon, Share
from worker.core.lending import Lending
from worker.core.resident import Resident
from worker.core.supply import Lent

#: Memory is taken back when nobody has lacked any for this long, in seconds.
CALM_S = 1.0
#: Time between two layers that are taken back where nothing steps, in seconds.
BACK_EVERY_S = 0.05


@dataclass(frozen=True, slots=True)
class Circulate:
    """From now on the model lends so many layers and has so many slots: change what is where, at once; no step uses
    its weights."""

    name: str
    lent: int
    slots: int


@dataclass(slots=True)
class Remap:
    """See the module. residents: the device's models. instruct: takes instructions."""

    balloon: Balloon
    residents: Callable[[], Iterable[Resident]]
    instruct: Callable[[Circulate], object]
    #: When somebody last lacked memory.
    lacked_s: float = -math.inf
    #: A layer has been lent or taken back in this round.
    _moved: bool = False

    # ---- more --------------------------------------------------------------------------------------------------
    def lend(self, asker: Share, granules: int, now: float) -> Lent:
        """A request of `asker` lacks memory until `granules` are spare: lend it that of a layer, if all that could be
        lent suffices."""
        self.lacked_s = now
        able = self._able(asker, now)
        if not able or sum(count * each.granules for _, each, count in able) + self.balloon.spare < granules:
            return Lent.NEVER
        if self._moved:
            return Lent.NEXT
        resident, lending, _ = able[0]
        lent = lending.lent + 1
        idle = lending.slots_idle(lent)
        slots = idle if resident.core.quiet else lending.slots_for(lent, _decodes(resident)) or idle
        self._change(resident, lent, slots, now, Why.LENT, asker.name)
        return Lent.NOW

    def _able(self, asker: Share, now: float) -> list[tuple[Resident, Lending, int]]:
        """Models that may lend, in the order in which they do, and how many layers more."""
        idle = list[tuple[Resident, Lending, int]]()
        own = list[tuple[Resident, Lending, int]]()
        for resident in self.residents():
            lending = resident.lending
            if lending is None or resident.state is not ModelState.ACTIVE or resident.pinned:
                continue
            if resident.share is asker:
                if (count := lending.active_most(_decodes(resident), now) - lending.lent) > 0:
                    own.append((resident, lending, count))
            elif resident.core.quiet and (count := lending.idle_most() - lending.lent) > 0:
                idle.append((resident, lending, count))
        idle.sort(key=lambda each: (-each[0].share.priority, -each[0].idle_since_s))
        return idle + own

    # ---- less --------------------------------------------------------------------------------------------------
    def round(self, now: float) -> None:
        """A round of turns begins: take a layer back where it is due."""
        self._moved = False
        lenders = [each for each in self.residents() if _lends(each)]
        for resident in lenders:
            self._adapt(resident, now)
        lenders.sort(key=self._order)
        for resident in lenders:
            if not self._moved and (self._is_slow(resident) or now - self.lacked_s >= CALM_S):
                self._take_back(resident, now)

    def _adapt(self, resident: Resident, now: float) -> None:
        """Another number of slots, if the steps need it: that takes no memory."""
        lending = _of(resident)
        if resident.core.quiet or self._moved:
            return
        slots = lending.slots_for(lending.lent, _decodes(resident))
        if slots is not None and slots > lending.slots:
            self._change(resident, lending.lent, slots, now)

    def _take_back(self, resident: Resident, now: float) -> None:
        lending = _of(resident)
        growth = sum(each.granules_of(_decodes(each)) for each in self.residents())
        if self.balloon.obtainable < lending.granules + growth or not self.balloon.collect(lending.granules, now):
            return
        lent, why = lending.lent - 1, Why.SLOW if self._is_slow(resident) else Why.CALM
        slots = 0 if lent == 0 else min(lending.slots, lending.slots_for(lent, _decodes(resident)) or lending.slots)
        self._change(resident, lent, slots, now, why)

    @staticmethod
    def _is_slow(resident: Resident) -> bool:
        return not resident.core.quiet and _of(resident).too_many(_decodes(resident))

    def _order(self, resident: Resident) -> tuple[bool, bool, float]:
        return not self._is_slow(resident), resident.core.quiet, -_of(resident).changed_s

    def due_in_s(self, now: float) -> float:
        """Seconds until a layer may be due to come back; infinite: nothing is lent."""
        lenders = [each for each in self.residents() if _lends(each)]
        if not lenders:
            return math.inf
        if any(self._is_slow(each) for each in lenders):
            return BACK_EVERY_S
        return max(self.lacked_s + CALM_S - now, BACK_EVERY_S)

    def _change(
        self, resident: Resident, lent: int, slots: int, now: float, why: Why | None = None, other: str = ""
    ) -> None:
        """why, other: see `WeightsMove`; None: only the slots change."""
        self._moved = True
        _of(resident).change(lent, slots, now)
        if why is not None:
            resident.note(WeightsMove(now, resident.state, why, other, layers_lent=lent))
        resident.share.weights = resident.weights
        self.instruct(Circulate(resident.name, lent, slots))


def _of(resident: Resident) -> Lending:
    assert resident.lending is not None
    return resident.lending


def _lends(resident: Resident) -> bool:
    return resident.state is ModelState.ACTIVE and resident.lending is not None and resident.lending.lent > 0


def _decodes(resident: Resident) -> int:
    """Sequences that its next steps will have."""
    return len(resident.yielding.on_device)
