"""Parrot (Lin et al., OSDI '24) as SYMPHONY uses it: it knows which requests belong to one application run and puts them together.

SYMPHONY, section 4.4: "Parrot-serve introduces a semantic variable abstraction to chain multiple LLM requests. However, this abstraction
fails when processing agentic workflows with conditionals [...]. Similar to Infercept, this forces the serving state to become fragmented
and stateful, leading to load imbalance. Furthermore, because Parrot relies exclusively on keeping KV caches in GPU memory, it must discard
prior requests when memory is exhausted."

From Parrot's own paper (section 5.4, Algorithm 1): requests that share a prefix, or a context that an engine has, go to that engine; others
where they cost the least, here where there are the fewest requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from contracts.ids import SessionKey
from loadtest.simulate.systems.contract import Active, Migration, Paused, View

IN_HBM = frozenset(("hbm",))


class Parrot:
    """See the module. Whoever belongs to no run is placed by session."""

    migrates_every_s = 0.0

    def __init__(self) -> None:
        self._engine: dict[tuple[str, SessionKey | None], str] = {}

    def place(self, session: SessionKey, group: str, now: float, views: Sequence[View]) -> str:
        """The engine that has the run's contexts; of a new run, the one with the fewest requests."""
        of = (group, None if group else session)
        if of not in self._engine:
            self._engine[of] = min(views, key=lambda v: v.requests).name
        return self._engine[of]

    def sources(self, session: SessionKey) -> tuple[str, ...]:
        """None."""
        return ()

    def ended(self, paused: Paused, node: str, now: float) -> frozenset[str]:
        """It stays in HBM until somebody needs the room."""
        return IN_HBM

    def migrations(self, views: Sequence[View], active: Mapping[str, Sequence[Active]]) -> list[Migration]:
        """None."""
        return []
