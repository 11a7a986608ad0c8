"""The interface of an engine to the worker's service: enough for reports to the scheduler and for metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from runtime.reporter import ReportedEngine


@dataclass(frozen=True, slots=True)
class Tallies:
    """An engine's totals since it started, in bytes and tokens; unknown ones are 0 or missing.

    kv_bytes, kv_limit_bytes: HBM that KV uses now, and its limit. hit_bytes: KV that requests found in HBM.
    evicted_bytes: by rank. hint_bytes: by outcome. loaded_bytes: into HBM, by demand or hint. saved_bytes: out of HBM.
    planned_tokens: cached tokens, loaded or recomputed. recomputed_tokens: by the event that took their sequence off
    the device. failed: accepted requests that failed, by error code.
    """

    kv_bytes: int = 0
    kv_limit_bytes: int = 0
    hit_bytes: int = 0
    evicted_bytes: Mapping[str, int] = field(default_factory=dict)
    hint_bytes: Mapping[str, int] = field(default_factory=dict)
    loaded_bytes: Mapping[str, int] = field(default_factory=dict)
    saved_bytes: int = 0
    planned_tokens: Mapping[str, int] = field(default_factory=dict)
    preemptions: int = 0
    recomputed_tokens: Mapping[str, int] = field(default_factory=dict)
    failed: Mapping[str, int] = field(default_factory=dict)


class Engine(ReportedEngine, Protocol):
    """One model on one device. Attributes may be read on any thread."""

    @property
    def idle(self) -> bool:
        """No request is live and all write-back is done."""
        ...

    def tallies(self) -> Tallies:
        """The totals; read one by one, so they may be from slightly different moments."""
        ...
