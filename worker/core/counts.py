"""What an engine tells of itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Counts:
    """What the scheduler is told. outstanding_s: by priority. pages_free: that nobody uses; pages_cached: those of them that hold cache."""

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
