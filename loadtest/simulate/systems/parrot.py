"""Parrot (Lin et al., OSDI '24) as SYMPHONY uses it: places the requests of one application run together.

SYMPHONY, section 4.4: "Parrot-serve introduces a semantic variable abstraction to chain multiple LLM requests. However,
this abstraction fails when processing agentic workflows with conditionals [...]. Similar to Infercept, this forces the
serving state to become fragmented and stateful, leading to load imbalance. Furthermore, because Parrot relies
exclusively on keeping KV caches in GPU memory, it must discard prior requests when memory is exhausted."

From Parrot's paper (section 5.4, Algorithm 1): requests that share a prefix, or a context of an engine, go to that
engine; others to the engine with the least cost, here the fewest requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from contracts.ids import SessionKey
from loadtest.simulate.systems.contract import Active, Migration, Paused, View

IN_HBM = frozenset(("hbm",))


class Parrot:
    """See the module. Requests without a run are placed by session."""

    migrates_every_s = 0.0

    def __init__(self) -> None:
        self._engine: dict[tuple[str, SessionKey | None], str] = {}

    def place(self, session: SessionKey, group: str, now: float, views: Sequence[View]) -> str:
        """The engine of the run; for a new run, the one with the fewest requests."""
        of = (group, None if group else session)
        if of not in self._engine:
            self._engine[of] = min(views, key=lambda v: v.requests).name
        return self._engine[of]

    def sources(self, session: SessionKey) -> tuple[str, ...]:
        """None."""
        return ()

    def ended(self, paused: Paused, node: str, now: float) -> frozenset[str]:
        """HBM, until it is evicted."""
        return IN_HBM

    def migrations(self, views: Sequence[View], active: Mapping[str, Sequence[Active]]) -> list[Migration]:
        """None."""
        return []
