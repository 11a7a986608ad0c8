"""Estimates how fast each source is, and which would bring some bytes soonest. What is asked is decided in sources.py.

A source has a latency and a time per byte. Each transfer corrects both, each by its share of the expected time, as a
moving average of logarithms: a transfer of a hundred times the usual time counts at once, and one hiccup does not stay.
An estimate without new measurements drifts back to its prior, so an abandoned source is tried again. `usual` is the
same average over a long time.

Transfers share a source: each is measured by all bytes that its source moved meanwhile, and an estimate adds the bytes
queued ahead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from kvstore.core.events import SourceKind

#: Weight of a new measurement in `cost`, and its minimum in `usual`, where the first ones count more.
_WEIGHT, _USUAL_WEIGHT, _PRIOR_SAMPLES = 0.3, 0.02, 8
#: A first measurement this many times above usual gets the minimum weight.
_UNUSUAL = 5.0
#: An estimate's distance from its prior shrinks by e in this time without measurements.
_FADE_S = 60.0
#: A source later in the order overtakes when it takes less than this part of the time, until it takes longer.
_CLEARLY = 0.5
_LATENCY_S, _BYTE_S = (1e-5, 60.0), (1e-11, 1e-3)


class Source(NamedTuple):
    """Something that can be read. on_disk: chunks that the peer must first read from its own SSD."""

    kind: SourceKind
    peer: str = ""
    on_disk: bool = False


SSD, BLOB = Source(SourceKind.SSD), Source(SourceKind.BLOB)


class Cost(NamedTuple):
    """A transfer of n bytes takes `latency_s + n * byte_s`."""

    latency_s: float
    byte_s: float

    def of(self, size: float) -> float:
        """Seconds for `size` bytes."""
        return self.latency_s + size * self.byte_s

    def corrected(self, size: float, took_s: float, weight: float) -> Cost:
        """This cost, corrected by a transfer of `size` bytes that took `took_s`."""
        expected = self.of(size)
        share = size * self.byte_s / expected
        off = max(took_s, 1e-6) / expected
        latency_s, byte_s = self.latency_s * off ** (weight * (1 - share)), self.byte_s * off ** (weight * share)
        return Cost(_within(latency_s, _LATENCY_S), _within(byte_s, _BYTE_S))


#: Costs before the first measurement.
PRIORS = {
    SourceKind.SSD: Cost(0.0005, 1e-9),
    SourceKind.PEER: Cost(0.003, 1e-9),
    SourceKind.BLOB: Cost(0.02, 1e-8),
}
#: Reading a peer's SSD, in addition to the transfer from its arena.
PEER_DISK_PRIOR = Cost(0.002, 1e-9)


def prior(source: Source) -> Cost:
    """The assumed cost of an unmeasured source."""
    return PEER_DISK_PRIOR if source.on_disk else PRIORS[source.kind]


class _Measured:
    __slots__ = ("cost", "measured_at", "moved", "samples", "usual")

    def __init__(self, believed: Cost) -> None:
        self.cost = believed
        self.usual = believed
        self.samples = 0
        self.measured_at = 0.0
        self.moved = 0


class Rates:
    """See the module. Sizes in bytes, times in monotonic seconds."""

    def __init__(self) -> None:
        self._sources: dict[Source, _Measured] = {}
        self._ahead: dict[Source, int] = {}
        self._optional: dict[Source, int] = {}  #: the part of `_ahead` that hints want
        self._late: dict[Source, int] = {}  #: the part of `_optional` that will be late
        self._overtaken: set[tuple[Source, Source]] = set()

    def _of(self, source: Source) -> _Measured:
        if source not in self._sources:
            self._sources[source] = _Measured(prior(source))
        return self._sources[source]

    # ---- what happens

    def queue(self, source: Source, size: int, *, optional: bool = False, late: bool = False) -> None:
        """Add `size` bytes (negative: remove) to those queued at or being read from the source. optional: for a hint,
        behind demand. late: behind all others."""
        self._ahead[source] = self._ahead.get(source, 0) + size
        if optional:
            self._optional[source] = self._optional.get(source, 0) + size
        if late:
            self._late[source] = self._late.get(source, 0) + size

    def ahead(self, source: Source, *, of_demand: bool = False) -> int:
        """Bytes queued at or being read from the source. of_demand: without those of hints."""
        return self._ahead.get(source, 0) - (self._optional.get(source, 0) if of_demand else 0)

    def moved(self, source: Source) -> int:
        """Bytes that the source has brought so far. A transfer records this when it begins."""
        return self._of(source).moved

    def observe(self, source: Source, size: int, moved_before: int, took_s: float, now: float) -> float:
        """A transfer of `size` bytes succeeded. Returns how many times longer than usual it took."""
        measured = self._of(source)
        measured.moved += size
        moved = measured.moved - moved_before
        slowness = took_s / measured.usual.of(moved)
        measured.cost = self._now(source, measured, now).corrected(moved, took_s, _WEIGHT)
        first = 1 / (measured.samples + _PRIOR_SAMPLES) if slowness < _UNUSUAL else 0.0
        weight = max(_USUAL_WEIGHT, first)
        measured.usual = measured.usual.corrected(moved, took_s, weight)
        measured.samples += 1
        measured.measured_at = now
        return slowness

    def failed(self, source: Source, size: int, took_s: float, now: float) -> None:
        """A transfer failed or did not end in `took_s`: counts as at least that slow, and slower than estimated."""
        measured = self._of(source)
        current = self._now(source, measured, now)
        took_s = max(took_s, 4 * current.of(size))
        measured.cost, measured.measured_at = current.corrected(size, took_s, _WEIGHT), now

    # ---- questions

    def cost(self, source: Source, now: float) -> Cost:
        """The source's estimated cost now."""
        return self._now(source, self._of(source), now)

    def is_known(self, source: Source, now: float) -> bool:
        """Whether the source was measured lately."""
        measured = self._of(source)
        return measured.samples > 0 and now - measured.measured_at < _FADE_S

    def usual_s(self, source: Source, size: int) -> float:
        """Seconds that `size` bytes usually take."""
        return self._of(source).usual.of(size)

    def estimate_s(self, source: Source, size: int, now: float, *, before_late: bool = False) -> float:
        """Seconds until `size` more bytes would be here. before_late: if queued ahead of late hints."""
        link = Source(source.kind, source.peer)
        ahead = self.ahead(link) - (self._late.get(link, 0) if before_late else 0)
        total = self.cost(link, now).of(ahead + size)
        return total + self.cost(source, now).of(size) if source.on_disk else total

    def sooner(self, first: Source, second: Source, size: int, now: float) -> bool:
        """Whether `second`, later in the order, is preferred to `first`. With hysteresis (_CLEARLY), so that nearly
        equal sources do not alternate. Remembers the answer."""
        a, b = self.estimate_s(first, size, now), self.estimate_s(second, size, now)
        pair = (first, second)
        if b < a * (1.0 if pair in self._overtaken else _CLEARLY):
            self._overtaken.add(pair)
            return True
        self._overtaken.discard(pair)
        return False

    def soonest(self, candidates: Sequence[Source], size: int, now: float) -> Source | None:
        """The candidate that would bring `size` bytes first; ties keep their order. None when there is none."""
        best: Source | None = None
        for candidate in candidates:
            if best is None or self.sooner(best, candidate, size, now):
                best = candidate
        return best

    def _now(self, source: Source, measured: _Measured, now: float) -> Cost:
        believed = prior(source)
        kept = math.exp(-max(0.0, now - measured.measured_at) / _FADE_S) if measured.measured_at else 1.0
        return Cost(
            believed.latency_s * (measured.cost.latency_s / believed.latency_s) ** kept,
            believed.byte_s * (measured.cost.byte_s / believed.byte_s) ** kept,
        )

    def validate(self) -> None:
        """Raise AssertionError when an invariant does not hold."""
        for source, size in self._ahead.items():
            assert 0 <= self._late.get(source, 0) <= self._optional.get(source, 0) <= size


def _within(value: float, limits: tuple[float, float]) -> float:
    return min(max(value, limits[0]), limits[1])
