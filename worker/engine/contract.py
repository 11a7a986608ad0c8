"""What a worker's service knows of an engine, whatever computes behind it: reports to the scheduler and metrics need no more."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from contracts.kv import KvShape
from worker.core.counts import Counts


@dataclass(frozen=True, slots=True)
class Tallies:
    """What an engine holds and has counted since it started, in bytes and tokens; what it does not know is 0 or missing.

    kv_bytes, kv_limit_bytes: of HBM that its KV holds, and may hold. hit_bytes: of KV that requests found in HBM. evicted_bytes: by why it
    ranked first. hint_bytes: by what became of them. loaded_bytes: into HBM, for a demand or a hint. saved_bytes: out of HBM.
    planned_tokens: cached ones, by whether they were loaded or computed again. recomputed_tokens: by what had taken their sequence off the
    device. failed: requests after they were accepted, by the code of their error.
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


class Engine(Protocol):
    """One model on one device. Attributes are read on any thread."""

    #: In the API.
    model_name: str
    #: What it has to do, taken some ten times a second.
    counts: Counts
    #: Ended requests that the scheduler has not been told of; whoever tells it takes them.
    finished: collections.deque[str]
    #: To be called when the set of requests has changed, on any thread.
    on_requests: Callable[[], None]

    @property
    def shape(self) -> KvShape:
        """Of its KV."""
        ...

    @property
    def idle(self) -> bool:
        """Nothing runs, and everything finished is below."""
        ...

    @property
    def stalled_s(self) -> float:
        """How long it has done nothing beyond the time its step should have taken."""
        ...

    def tallies(self) -> Tallies:
        """Each figure is one read of one number, so that figures of one call may be of slightly different moments."""
        ...
