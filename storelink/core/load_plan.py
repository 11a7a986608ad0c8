"""How much of a cached prompt is loaded, how much is computed again, and when a step may begin while layers still come.

Loading and computing overlap layer by layer (SYMPHONY, section 3.4), so a prompt is ready after about the longer of the two. Where a
tier is slow, or little is missing, computing a stretch again is sooner than bringing it; an estimate of both decides, chunk by chunk
from the end, as a prefix is all that can be used. What is not known is taken to cost nothing: loading teaches what it costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

#: Computing again must be clearly sooner: it also takes compute from others, and estimates are noisy.
CLEARLY = 0.8
_WEIGHT = 0.3
#: A rate that was not seen for so long is not believed, so that a tier that was slow once is tried again, in seconds.
BELIEVED_S = 60.0


class Source(IntEnum):
    """Where a chunk comes from, as the store says (LoadFound.sources)."""

    DRAM = 0
    SSD = 1
    PEER = 2
    BLOB = 3


@dataclass(frozen=True, slots=True)
class LoadRate:
    """Seconds from asking until the first piece comes, and from piece to piece."""

    latency_s: float
    piece_s: float


@dataclass(slots=True)
class LoadRates:
    """What loads from each source took lately, at this worker; else what was measured before (`upbeat profile`)."""

    _lately: dict[Source, tuple[LoadRate, float]] = field(default_factory=dict)
    _seeds: dict[Source, LoadRate] = field(default_factory=dict)

    def seed(self, source: Source, rate: LoadRate) -> None:
        """What is believed as long as nothing was observed lately."""
        self._seeds[source] = rate

    def observed(self, source: Source, latency_s: float, piece_s: float, now: float) -> None:
        """A load from `source` took so long."""
        old = self.of(source, now)
        new = LoadRate(max(latency_s, 0.0), max(piece_s, 0.0))
        if old is not None:
            new = LoadRate(*(a + _WEIGHT * (b - a) for a, b in ((old.latency_s, new.latency_s), (old.piece_s, new.piece_s))))
        self._lately[source] = (new, now)

    def of(self, source: Source, now: float) -> LoadRate | None:
        """What is believed; None when nothing is known."""
        known = self._lately.get(source)
        return known[0] if known is not None and now - known[1] < BELIEVED_S else self._seeds.get(source)

    def believed(self, now: float) -> dict[Source, LoadRate]:
        """All that is believed now."""
        return {source: rate for source in Source if (rate := self.of(source, now)) is not None}


@dataclass(frozen=True, slots=True)
class Missing:
    """A chunk of which so many pieces are not in HBM, and where they would come from.

    due_s: seconds until they, and all before them, are in DRAM, as the store reckons from its queues; None: it did not say, so that what
    loads from there took lately counts.
    """

    pieces: int
    source: Source
    due_s: float | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """The first `chunks` of those that are missing are loaded. Estimates in seconds: of this, and of loading them all."""

    chunks: int
    seconds: float
    all_seconds: float


@dataclass(frozen=True, slots=True)
class Prefill:
    """What is computed in any case, in tokens, and what a token costs; layers of the model; whether loads overlap with compute.

    queued_s: others' prompts are computed first for so long. Loads come meanwhile, and what is computed again waits for its turn.
    step_tokens: what one step computes of a prompt; 0: all of it. Each step needs every loaded layer, so only the first one hides a load.
    """

    tokens: int
    token_s: float
    chunk_tokens: int
    layers: int
    overlap: bool = True
    queued_s: float = 0.0
    step_tokens: int = 0


def estimate_s(loaded: Sequence[Missing], computed_chunks: int, rates: Mapping[Source, LoadRate], prefill: Prefill) -> float:
    """Seconds until a prompt has its first token when `loaded` are loaded and as many chunks behind them computed."""
    load = _Loading(rates)
    for chunk in loaded:
        load.add(chunk)
    return _together(load.seconds, (prefill.tokens + computed_chunks * prefill.chunk_tokens) * prefill.token_s, prefill)


def plan(missing: Sequence[Missing], rates: Mapping[Source, LoadRate], prefill: Prefill) -> Plan:
    """How many of the missing chunks, from the first on, to load: all, unless computing from some chunk on is clearly sooner."""
    count = len(missing)
    everything = best_s = estimate_s(missing, 0, rates, prefill)
    best, load = count, _Loading(rates)
    for k in range(count):  # load the first k, compute the rest; sums are carried along
        seconds = _together(load.seconds, (prefill.tokens + (count - k) * prefill.chunk_tokens) * prefill.token_s, prefill)
        if seconds <= CLEARLY * everything and seconds < best_s:
            best, best_s = k, seconds
        load.add(missing[k])
    return Plan(best, best_s, everything)


@dataclass(slots=True)
class _Loading:
    """Seconds that a growing prefix takes to be in HBM: whatever is the slower, the store's queues or the ways whose pace is known here."""

    rates: Mapping[Source, LoadRate]
    _latency_s: float = 0.0
    _pieces_s: float = 0.0
    _due_s: float = 0.0

    def add(self, chunk: Missing) -> None:
        """One more chunk."""
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
    """A load and the first step overlap but for one layer, or follow each other; the wait for others hides loading, too."""
    load_s = max(load_s - prefill.queued_s, 0.0)
    if not prefill.overlap:
        return prefill.queued_s + load_s + compute_s
    first_s = min(compute_s, prefill.step_tokens * prefill.token_s) if prefill.step_tokens else compute_s
    together_s = max(load_s, first_s) + min(load_s, first_s) / max(prefill.layers, 1)
    return prefill.queued_s + together_s + compute_s - first_s


def layer_load_s(missing: Sequence[Missing], rates: Mapping[Source, LoadRate], layers: int, ready_layers: int, elapsed_s: float) -> float:
    """Seconds from one layer to the next of a load that brought `ready_layers` (at least one) in `elapsed_s`.

    What the rates say counts as one more layer that came: the first layer alone says little, as it may come with the answer.
    """
    load = _Loading({source: LoadRate(0.0, rate.piece_s) for source, rate in rates.items()})
    for chunk in missing:
        load.add(chunk)
    expected_s = load.seconds / layers
    return (elapsed_s + expected_s) / (ready_layers + 1) if expected_s else elapsed_s / ready_layers


def may_start(ready_layers: int, layers: int, layer_load_s: float, layer_compute_s: float, patience_s: float = 0.0) -> bool:
    """True when, starting now, no layer would have to be waited for longer than `patience_s` in all, by the estimates.

    ready_layers: leading layers that are in HBM. layer_load_s: time between two layers' arrivals. layer_compute_s: time
    one layer of the coming step takes. Layer l arrives after (l - ready + 1) loads and is wanted after l computations; what is waited
    in all is the most that any layer is late. That is linear in l, so its two ends decide.
    """
    if ready_layers >= layers:
        return True
    if ready_layers < 1:
        return False
    first, last = ready_layers, layers - 1
    return all((layer - ready_layers + 1) * layer_load_s <= layer * layer_compute_s + patience_s for layer in (first, last))
