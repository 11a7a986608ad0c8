"""An engine's load, as its process reports it to the scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Counts:
    """An engine's load now. outstanding_s: seconds of work by priority. pages_total: pages it has or could have now;
    pages_free: those that no sequence uses; pages_cached: those of them that hold cached KV here. in_flight: request
    ids. request_s, prefill_token_s: 0: not known. token_rate: admitted prompt tokens and decoded tokens a second.
    loading: those of `waiting` whose KV is being loaded."""

    running: int
    waiting: int
    outstanding_tokens: float
    outstanding_s: Mapping[int, float]
    request_s: float
    prefill_token_s: float
    pages_total: int
    pages_free: int
    pages_cached: int
    in_flight: tuple[str, ...]
    token_rate: float = 0.0
    loading: int = 0
