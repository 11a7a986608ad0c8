"""Where a turn's time goes in the worker: each sequence is in one phase at a time, and what it spent in each is told twice.

Once with its first token, which is what its caller waited for, and once with its last, what came after. A step's time is divided when it
is over: it stalled for a load, or took longer than usual while KV of others moved, or computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from contracts.turn_times import Phase
from storelink.core.load_plan import Source

_LOADS = {source: Phase(f"load-{source.name.lower()}") for source in Source}


@dataclass(slots=True)
class TurnTimes:
    """Seconds by phase since the last `take`. Invariant: they and the phase under way cover the time since then, without gaps."""

    since_s: float = 0.0
    phase: Phase = Phase.QUEUE
    #: Where the slowest part of its last load came from.
    source: Source = Source.DRAM
    _spent_s: dict[Phase, float] = field(default_factory=dict)

    def enter(self, phase: Phase, now: float) -> None:
        """From now on."""
        self.spend(self.phase, now - self.since_s)
        self.phase, self.since_s = phase, now

    def load(self, source: Source, now: float) -> None:
        """From now on it waits for pieces, the slowest of which come from `source`."""
        self.source = source
        self.enter(_LOADS[source], now)

    def spend(self, phase: Phase, seconds: float) -> None:
        """Add to a phase."""
        if seconds > 0.0:
            self._spent_s[phase] = self._spent_s.get(phase, 0.0) + seconds

    def stepped(self, now: float, stalled: Phase | None, stalled_s: float, slowed_s: float) -> None:
        """A step of its own is over: of its time, so much was a wait in `stalled` (None: for its own load), and so much a delay."""
        span_s = now - self.since_s
        stalled_s = min(stalled_s, span_s)
        slowed_s = min(slowed_s, span_s - stalled_s)
        self.spend(_LOADS[self.source] if stalled is None else stalled, stalled_s)
        self.spend(Phase.SLOWED, slowed_s)
        self.since_s += stalled_s + slowed_s
        self.enter(Phase.OTHERS, now)

    def take(self, now: float, after: Phase) -> dict[Phase, float]:
        """What was spent, and forget it; `after` is what comes."""
        self.enter(after, now)
        taken, self._spent_s = self._spent_s, {}
        return taken
