"""How many of the chunks that the store can bring are loaded, by what loads and prompts took lately. Pure."""

from __future__ import annotations

from contracts.kv import KvShape
from storelink.core.load_plan import LoadRates, Missing, Prefill, Source, plan
from upbeat_vllm.state import Load

_WEIGHT = 0.3


class LoadOrCompute:
    """prefill_token_s: seconds that a prompt's token takes; 0: not known."""

    def __init__(self, shape: KvShape) -> None:
        self._shape = shape
        self.rates = LoadRates()
        self.prefill_token_s = 0.0

    def chunks(self, load: Load, rest: int, queued: int, now: float) -> int:
        """How many of the found chunks to load: fewer where computing the others is sooner
        (`storelink.core.load_plan`). rest: tokens behind the found chunks. queued: tokens of prompts to compute
        first."""
        assert load.found is not None
        if not self.prefill_token_s or not load.found:
            return load.found
        layers, size = self._shape.layers, self._shape.chunk_tokens
        missing = [Missing(layers, _source(load, i), _due(load, i)) for i in range(load.found)]
        queued_s = queued * self.prefill_token_s
        prefill = Prefill(rest, self.prefill_token_s, size, layers, overlap=load.near, queued_s=queued_s)
        return plan(missing, self.rates.believed(now), prefill).chunks

    def observed(self, load: Load, waited_s: float, piece_s: float, now: float) -> None:
        """A load that waits for room in the arena is slow, however fast its pieces come then.

        waited_s: seconds from its order to the first piece. piece_s: between pieces.
        """
        if load.sources and load.found_s:
            latency_s = max(load.found_s - load.asked_s, 0.0) + waited_s
            self.rates.observed(Source(max(load.sources)), latency_s, piece_s, now)

    def stepped(self, seconds: float, prefill_tokens: int) -> None:
        """A step took so long and computed so many tokens of prompts."""
        if prefill_tokens >= self._shape.chunk_tokens:
            found = seconds / prefill_tokens
            old = self.prefill_token_s
            self.prefill_token_s = found if not old else old + _WEIGHT * (found - old)


def _source(load: Load, i: int) -> Source:
    return Source(load.sources[i]) if i < len(load.sources) else Source.DRAM


def _due(load: Load, i: int) -> float | None:
    return load.due_s[i] if i < len(load.due_s) and load.due_s[i] >= 0 else None
