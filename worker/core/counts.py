"""An engine's load, as reported to the scheduler."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Counts:
    """See `runtime.reporter.Counts`."""

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
