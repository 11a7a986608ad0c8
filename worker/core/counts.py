"""An engine's load, as reported to the scheduler."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Counts:
    """outstanding_s: seconds of work by priority. pages_free: pages no sequence uses; pages_cached: those of them that
    hold cached KV. in_flight: request ids."""

    running: int
    waiting: int
    outstanding_tokens: int
    outstanding_s: dict[int, float]
    request_s: float
    prefill_token_s: float
    pages_total: int
    pages_free: int
    pages_cached: int
    in_flight: tuple[str, ...]
