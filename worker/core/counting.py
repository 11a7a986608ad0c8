"""An engine's load, for the scheduler."""

from __future__ import annotations

from collections.abc import Mapping

from contracts.counts import Counts
from worker.core.pace import Pace
from worker.core.sequence import Sequence, State
from worker.core.state import CoreState


def counts_of(live: Mapping[str, Sequence], state: CoreState, pace: Pace) -> Counts:
    """The load now. live: sequences by request."""
    sequences, cache = live.values(), state.cache
    in_use = cache.pool.taken - cache.cached
    # A model that is not here could also have its weights' memory.
    total = min(in_use + cache.available(), cache.pool.total)
    running = sum(s.state is State.RUNNING for s in sequences)
    return Counts(
        running=running,
        waiting=len(sequences) - running,
        outstanding_tokens=sum(s.pending + max(s.max_tokens - s.generated, 0) for s in sequences),
        outstanding_s=pace.outstanding_s(sequences, state.shape.chunk_tokens),
        request_s=pace.request_s,
        prefill_token_s=pace.prefill_token_s,
        pages_total=total,
        pages_free=total - in_use,
        pages_cached=cache.cached,
        in_flight=tuple(live),
        token_rate=state.token_rate.at(state.now),
        loading=sum(s.state is State.LOADING for s in sequences),
    )
