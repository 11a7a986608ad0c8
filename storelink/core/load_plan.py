"""How much of a cached prompt is loaded, how much is recomputed, and when a step may begin while layers still arrive.

Loading and computing overlap layer by layer (SYMPHONY, section 3.4), so a prompt is ready after about the longer of the
two. Where a tier is slow, or little is missing, recomputing is faster. Estimates of both decide how long a prefix of
the missing chunks is loaded. Unknown rates count as zero cost, so that a first load measures them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

#: Recomputing must take at most this share of the time of loading: it takes compute from others, and estimates are
#: noisy.
CLEARLY = 0.8
_WEIGHT = 0.3
#: Seconds after which an observed rate expires, so that a tier that was slow once is tried again.
BELIEVED_S = 60.0


class Source(IntEnum):
    """Where a chunk comes from; the store's numbers (LoadFound.sources)."""

    DRAM = 0
    SSD = 1
    PEER = 2
    BLOB = 3


@dataclass(frozen=True, slots=True)
class LoadRate:
    """Seconds from the request to the first piece, and between pieces."""

    latency_s: float
    piece_s: float


@dataclass(slots=True)
class LoadRates:
    """Load rates by source: recent observations of this worker, else those of its profile (`upbeat profile`)."""

    _lately: dict[Source, tuple[LoadRate, float]] = field(default_factory=dict)
    _seeds: dict[Source, LoadRate] = field(default_factory=dict)

    def seed(self, source: Source, rate: LoadRate) -> None:
        """Sets the rate used while there is no recent observation."""
        self._seeds[source] = rate

    def observed(self, source: Source, latency_s: float, piece_s: float, now: float) -> None:
        """Adds an observed load from `source` to its moving average."""
        old = self.of(source, now)
        new = LoadRate(max(latency_s, 0.0), max(piece_s, 0.0))
        if old is not None:
            new = LoadRate(
                *(a + _WEIGHT * (b - a) for a, b in ((old.latency_s, new.latency_s), (old.piece_s, new.piece_s)))
            )
        self._lately[source] = (new, now)

    def of(self, source: Source, now: float) -> LoadRate | None:
        """The current rate of a source; None when unknown."""
        known = self._lately.get(source)
        return known[0] if known is not None and now - known[1] < BELIEVED_S else self._seeds.get(source)

    def believed(self, now: float) -> dict[Source, LoadRate]:
        """The current rates of all known sources."""
        return {source: rate for source in Source if (rate := self.of(source, now)) is not None}


@dataclass(frozen=True, slots=True)
class Missing:
    """A chunk with `pieces` pieces not in HBM, and the tier that has them.

    due_s: the store's estimate of seconds until this chunk and all before it are in DRAM, from its queues. None: no
    estimate; then the observed rate of the source counts.
    """

    pieces: int
    source: Source
    due_s: float | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Load the first `chunks` missing chunks, recompute the rest. seconds, all_seconds: estimates of this plan and of
    loading all."""

    chunks: int
    seconds: float
    all_seconds: float


@dataclass(frozen=True, slots=True)
class Prefill:
    """The compute side of an estimate.

    tokens: computed in any case, at token_s each. overlap: whether loads overlap with compute. queued_s: time spent on
    other prompts first; loads proceed meanwhile, computing waits. step_tokens: tokens of this prompt per step (0: all).
    Every step needs all loaded layers, so only the first step hides a load.
    """

    tokens: int
    token_s: float
    chunk_tokens: int
    layers: int
    overlap: bool = True
    queued_s: float = 0.0
    step_tokens: int = 0


def estimate_s(
    loaded: Sequence[Missing], computed_chunks: int, rates: Mapping[Source, LoadRate], prefill: Prefill
) -> float:
    """Seconds to the first token when `loaded` chunks are loaded and `computed_chunks` behind them are recomputed."""
    load = _Loading(rates)
    for chunk in loaded:
        load.add(chunk)
    return _together(load.seconds, (prefill.tokens + computed_chunks * prefill.chunk_tokens) * prefill.token_s, prefill)


def plan(missing: Sequence[Missing], rates: Mapping[Source, LoadRate], prefill: Prefill) -> Plan:
    """How many of the missing chunks, from the first, to load: all, unless recomputing from some chunk on is clearly
    faster (CLEARLY)."""
    count = len(missing)
    everything = best_s = estimate_s(missing, 0, rates, prefill)
    best, load = count, _Loading(rates)
    for k in range(count):  # load the first k, compute the rest
        seconds = _together(
            load.seconds, (prefill.tokens + (count - k) * prefill.chunk_tokens) * prefill.token_s, prefill
        )
        if seconds <= CLEARLY * everything and seconds < best_s:
            best, best_s = k, seconds
        load.add(missing[k])
    return Plan(best, best_s, everything)


@dataclass(slots=True)
class _Loading:
    """Seconds to load a growing prefix into HBM: the larger of the store's estimate and the sum of known rates."""

    rates: Mapping[Source, LoadRate]
    _latency_s: float = 0.0
    _pieces_s: float = 0.0
    _due_s: float = 0.0

    def add(self, chunk: Missing) -> None:
        """Extends the prefix by a chunk."""
        if not chunk.pieces:
            return
        rate = self.rates.get(chunk.source if chunk.due_s is None else Source.DRAM)
        if rate is not None:
            self._latency_s = max(self._latency_s, rate.latency_s)
            self._pieces_s += chunk.pieces * rate.piece_s
        if chunk.due_s is not None:
            self._due_s = max(self._due_s, chunk.due_s)

    @property
    def seconds(self) -> float:
        return max(self._latency_s + self._pieces_s, self._due_s)


def _together(load_s: float, compute_s: float, prefill: Prefill) -> float:
    """Total seconds. Loading overlaps with the queue and, with `overlap`, with all but one layer of the first step."""
    load_s = max(load_s - prefill.queued_s, 0.0)
    if not prefill.overlap:
        return prefill.queued_s + load_s + compute_s
    first_s = min(compute_s, prefill.step_tokens * prefill.token_s) if prefill.step_tokens else compute_s
    together_s = max(load_s, first_s) + min(load_s, first_s) / max(prefill.layers, 1)
    return prefill.queued_s + together_s + compute_s - first_s


def layer_load_s(
    missing: Sequence[Missing], rates: Mapping[Source, LoadRate], layers: int, ready_layers: int, elapsed_s: float
) -> float:
    """Seconds per layer of a load that brought `ready_layers` (at least one) in `elapsed_s`.

    The expected time per layer counts as one more observed layer: the first layer may arrive with the answer, so alone
    it says little.
    """
    load = _Loading({source: LoadRate(0.0, rate.piece_s) for source, rate in rates.items()})
    for chunk in missing:
        load.add(chunk)
    expected_s = load.seconds / layers
    return (elapsed_s + expected_s) / (ready_layers + 1) if expected_s else elapsed_s / ready_layers


def may_start(ready_layers: int, layers: int, layer_load_s: float, layer_compute_s: float, late_s: float = 0.0) -> bool:
    """True when a step that starts now is expected to wait at most `late_s` for layers in total.

    ready_layers: leading layers in HBM. layer_load_s: time between arrivals of layers. layer_compute_s: time per layer
    of the coming step. Layer l arrives after (l - ready + 1) loads and is needed after l computations. The total wait
    is the largest lateness of any layer; lateness is linear in l, so the first and last missing layer decide.
    """
    if ready_layers >= layers:
        return True
    if ready_layers < 1:
        return False
    first, last = ready_layers, layers - 1
    return all((layer - ready_layers + 1) * layer_load_s <= layer * layer_compute_s + late_s for layer in (first, last))
