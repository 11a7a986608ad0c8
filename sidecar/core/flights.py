"""The requests that this device's server has from us, and what is reported of them.

Nobody else may reach the server, so this is all that it has. Invariant: a flight is in `Flights` from `begin` to `end`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from contracts.counts import Counts
from contracts.kv import KvShape
from sidecar.core.pace import Pace
from sidecar.core.samples import Sample


@dataclass(slots=True, eq=False)
class Flight:
    """One request. prompt_tokens: estimated, without those that are cached; expected_tokens: of its answer; 0: not
    known. produced: tokens of the answer that have come, as far as its pieces show. answering: some have. shared:
    others were on the server when it was lost."""

    request_id: str
    priority: int
    prompt_tokens: int
    expected_tokens: int
    began_s: float
    sent: bool = False
    answering: bool = False
    produced: int = 0
    shared: bool = False

    def left(self, pace: Pace) -> tuple[float, float]:
        """(tokens of the prompt to compute, tokens to generate), estimated."""
        expected = self.expected_tokens or pace.answer_tokens
        return 0.0 if self.answering else float(self.prompt_tokens), max(expected - self.produced, 1.0)


class Flights:
    """See the module."""

    def __init__(self) -> None:
        self._flights: set[Flight] = set()

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[Flight]:
        return iter(tuple(self._flights))

    def begin(self, flight: Flight) -> None:
        """The request has come."""
        self._flights.add(flight)

    def end(self, flight: Flight) -> None:
        """It has ended, however."""
        self._flights.discard(flight)

    def lost(self, flight: Flight) -> bool:
        """The server died, or dropped the request. Whether no other request was there: each of those that are lost
        together is told that it was not alone, though they are told one after the other."""
        others = [other for other in self._flights if other is not flight and other.sent]
        if others:
            flight.shared = True
            for other in others:
                other.shared = True
        return not flight.shared

    @property
    def oldest_s(self) -> float | None:
        """When the oldest one began; None: there is none."""
        return min((flight.began_s for flight in self._flights), default=None)

    def prompt_tokens(self) -> int:
        """Of all prompts that may still be computed, the longest's tokens."""
        return max((flight.prompt_tokens for flight in self._flights if not flight.answering), default=0)

    def load(self, pace: Pace, sample: Sample | None, shape: KvShape) -> Counts:
        """What is reported now. sample: the engine's last figures, None: it gives none."""
        outstanding_s: dict[int, float] = {}
        tokens = 0.0
        for flight in self._flights:
            prompt, answer = flight.left(pace)
            tokens += prompt + answer
            outstanding_s[flight.priority] = outstanding_s.get(flight.priority, 0.0) + pace.work_s(prompt, answer)
        count = len(self._flights)
        running = count if sample is None else min(count, int(sample.running))
        if sample is not None and count and not running and not sample.waiting:
            running = count  # the figures are older than the requests
        total, free, cached = pages(sample, shape)
        return Counts(
            running=running,
            waiting=count - running,
            outstanding_tokens=tokens,
            outstanding_s=outstanding_s,
            request_s=pace.request_s,
            prefill_token_s=pace.prefill_token_s,
            pages_total=total,
            pages_free=free,
            pages_cached=cached,
            in_flight=tuple({flight.request_id: None for flight in self._flights}),
        )


def pages(sample: Sample | None, shape: KvShape) -> tuple[int, int, int]:
    """(all, free, those of the free ones that hold cached KV) of the engine's KV, in pages of one layer of a chunk.

    vLLM does not say how many free blocks hold cached KV: as many as it has ever filled, until all are filled.
    """
    if sample is None or not sample.blocks:
        return 0, 0, 0
    block_tokens = sample.block_tokens or shape.chunk_tokens
    chunks = sample.blocks * block_tokens // shape.chunk_tokens
    free = round(chunks * (1.0 - sample.used))
    filled = int(sample.prompt_tokens + sample.generated_tokens) // shape.chunk_tokens
    return chunks * shape.layers, free * shape.layers, max(min(free, filled - (chunks - free)), 0) * shape.layers
