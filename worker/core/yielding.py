"""What an engine gives up for other models of its device: sequences for more urgent ones, and all when its weights
leave."""

from __future__ import annotations

from worker.core.balloon import YieldRank
from worker.core.consolidating import consolidate
from worker.core.engine_core import EngineCore
from worker.core.preemption import together
from worker.core.sequence import Sequence, State


class Yielding:
    """One engine's `balloon.Yields`."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    @property
    def on_device(self) -> list[Sequence]:
        """Sequences that hold memory."""
        return [s for s in self._core.live.values() if s.state in (State.RUNNING, State.LOADING)]

    def displaceable(self, rank: YieldRank) -> int:
        """See `balloon.Yields`."""
        return together(self._after(rank))

    def yield_to(self, now: float, rank: YieldRank, pages: int) -> bool:
        """See `balloon.Yields`."""
        self._core.state.now = now
        return self._core.scheduling.give_way(self._after(rank), self._core.live.values(), pages)

    def consolidate(self, slabs: int, now: float) -> None:
        """See `balloon.Yields`."""
        state, used = self._core.state, (b for s in self._core.live.values() for b in s.blocks)
        if (moved := consolidate(state.cache, used, slabs, now)) is not None:
            state.out.append(moved)

    def halt(self, now: float) -> None:
        """Preempt all sequences, as the model's weights leave. Their full chunks are saved; they wait."""
        self._core.state.now = now
        self._core.scheduling.halt(self.on_device)

    def _after(self, rank: YieldRank) -> list[Sequence]:
        asker = (rank.priority, rank.arrival_s, False)
        return [s for s in self.on_device if (s.request.priority, s.arrival_s, rank.first) > asker]
