"""What one model may lend to KV: memory of its layers, which then take turns (MIRAGE, sections 4 and 5).

A model of n layers that lends `lent` of them has `lent + slots` layers in *circulation*: these share 1 or 2 slots, and
each is copied from the image in host memory into its slot before a step uses it, while other layers compute. The rest
stay. Copies must take no longer than computing (equations 4 and 5), so a link that is slow beside computing lends
nothing.

Times are measured, so a model also lends too much when its steps are slower than with all layers here: copies may take
memory bandwidth and processors from computing.

Invariants (`validate`): `lent + slots` is at most `layers`; `slots` is 0 exactly when nothing is lent; `lent` is at
most `most`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

from worker.core.pace import Pace

#: Steps so many times slower than with all layers here are too slow, judged after so many of them; the first ones after
#: a change, which wait for copies, say nothing.
_SLOWER, _STEPS, _FIRST = 1.1, 8, 2
#: Weight of a step in the mean of how much slower steps are, and the most that one counts.
_WEIGHT, _MOST_SLOWER = 0.1, 4.0
#: A model that was too slow lends no more than that less one for so long, in seconds.
_REMEMBERED_S = 30.0
#: Part of the layers beyond which the gaps between those that take turns are so short that they must be even.
_NESTED = 0.4


def circulating(layers: int, lent: int, slots: int) -> list[int]:
    """The layers that take turns, in their order: `lent + slots` of all, or none if nothing is lent.

    With one slot they are evenly spaced, since each copy has only the time until the next of them. Two slots even out
    gaps that differ by a factor of two, if they are not short. There a layer more leaves the others where they are, so
    that a change moves few: each of these layers lies between those chosen before it (0, the middle, the quarters, and
    so on).
    """
    count = lent + slots if lent else 0
    if slots < 2 or count > _NESTED * layers:
        return [rank * layers // count for rank in range(count)]
    return sorted(_nested(layers)[:count])


@functools.cache
def _nested(layers: int) -> tuple[int, ...]:
    """All layers, by their numbers' bits reversed."""
    bits = (layers - 1).bit_length()
    parts = [int(f"{number:0{bits}b}"[::-1], 2) for number in range(1 << bits)]
    return tuple(dict.fromkeys(layers * part >> bits for part in parts))


@dataclass(slots=True)
class Lending:
    """One model's. layers: of the model. granules: of a layer. transfer_s: a copy of a layer. prefill_s: a short
    prompt's prefill. most: layers that it lends at most. pace: of its engine."""

    layers: int
    granules: int
    transfer_s: float
    prefill_s: float
    most: int
    pace: Pace
    lent: int = 0
    slots: int = 0
    #: When it last lent a layer or took one back.
    changed_s: float = -math.inf
    #: Totals: layers lent, and taken back.
    lendings: int = 0
    returns: int = 0
    #: The pace with all layers here.
    _resident: Pace | None = None
    #: Mean of how much slower steps are than with all layers here, and how many were seen.
    _slower: float = 1.0
    _seen: int = 0
    #: Layers that it lends at most until then, because more made it slow.
    _limit: int = 0
    _limited_s: float = -math.inf

    @property
    def circulating(self) -> list[int]:
        """See `circulating`."""
        return circulating(self.layers, self.lent, self.slots)

    @property
    def lent_granules(self) -> int:
        """Granules that it lends."""
        return self.lent * self.granules

    def slots_for(self, lent: int, decodes: int) -> int | None:
        """Slots with which copies take no longer than computing a step of so many decodes; None: there are none."""
        if lent == 0:
            return 0
        if lent > self.most:
            return None
        layer_s = self.layer_s(decodes)
        if lent + 2 <= self.layers and self.transfer_s * (lent + 2) <= layer_s * self.layers:
            return 2
        if lent + 1 <= self.layers and self.transfer_s * (lent + 1) <= layer_s * (self.layers - lent - 1):
            return 1
        return None

    def slots_idle(self, lent: int) -> int:
        """Slots with which it lends so many layers while idle."""
        return min(self.layers - lent, 2)

    def layer_s(self, decodes: int) -> float:
        """Time to compute a layer in a step of so many decodes, with all layers here."""
        return (self._resident or self.pace).decode_s(max(decodes, 1)) / self.layers

    def idle_most(self) -> int:
        """Layers that it may lend while idle: they come during the next prefill."""
        if self.transfer_s <= 0:
            return self.most
        return min(self.most, int(self.prefill_s / self.transfer_s), self.layers - 1)

    def active_most(self, decodes: int, now: float) -> int:
        """Layers that it may lend while it computes steps of so many decodes."""
        bound = min(self.most, self._limit) if now < self._limited_s else self.most
        lent = self.lent
        while lent < bound and self.slots_for(lent + 1, decodes) is not None:
            lent += 1
        return lent

    def too_many(self, decodes: int) -> bool:
        """Whether it lends more than its steps allow."""
        return self.lent > 0 and (self.slots_for(self.lent, decodes) is None or self.slow)

    @property
    def slow(self) -> bool:
        """Whether its steps are slower than with all layers here."""
        return self._seen >= _STEPS and self._slower > _SLOWER

    def change(self, lent: int, slots: int, now: float) -> None:
        """It now lends so many layers, and has so many slots."""
        if lent < self.lent and self.slow:
            self._limit, self._limited_s = lent, now + _REMEMBERED_S
        if self.lent == 0:
            self._resident = replace(self.pace)
        if lent == 0:
            self._resident = None
        self.lendings += max(lent - self.lent, 0)
        self.returns += max(self.lent - lent, 0)
        self.lent, self.slots, self.changed_s = lent, slots, now
        self._slower, self._seen = 1.0, -_FIRST

    def stepped(self, seconds: float, prefill_tokens: int, decodes: int, steps: int) -> None:
        """Learn from steps of `seconds` each."""
        if self._resident is None or prefill_tokens or not decodes:
            return
        if (expected_s := self._resident.decode_s(decodes)) > 0:
            if self._seen >= 0:
                self._slower += _WEIGHT * (min(seconds / expected_s, _MOST_SLOWER) - self._slower)
            self._seen += steps

    def validate(self) -> None:
        """Raise AssertionError when an invariant does not hold."""
        assert 0 <= self.lent <= self.most and self.lent + self.slots <= self.layers
        assert (self.slots == 0) == (self.lent == 0) and self.slots <= 2
        assert len(set(self.circulating)) == (self.lent + self.slots if self.lent else 0)
