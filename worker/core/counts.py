"""What an engine tells of itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Counts:
    """What the scheduler is told. outstanding_s: by priority."""

    running: int
    waiting: int
    outstanding_tokens: int
    outstanding_s: dict[int, float]
    request_s: float
    prefill_token_s: float
    pages_total: int
    pages_free: int
    in_flight: tuple[str, ...]
