"""Where a turn's time goes in the worker. Each sequence is in one phase at a time; the times are reported twice.

With the first token: the time until it. With the last token: the time after the first. A step's time is divided when it
ends: stalled for a load, slowed while other KV moved, or computing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from contracts.turn_times import Phase
from storelink.core.load_plan import Source

MOST_STAYS = 256
_LOADS = {source: Phase(f"load-{source.name.lower()}") for source in Source}


@dataclass(slots=True)
class TurnTimes:
    """Seconds by phase since the last `take`. Invariant: with the current phase they cover all time since then."""

    since_s: float = 0.0
    phase: Phase = Phase.QUEUE
    #: The slowest source of its last load.
    source: Source = Source.DRAM
    #: Where a trace is made: each stay in a phase, (phase, begin, end), the latest last; at most `MOST_STAYS`.
    stays: list[tuple[Phase, float, float]] | None = None
    _spent_s: dict[Phase, float] = field(default_factory=dict)

    def enter(self, phase: Phase, now: float) -> None:
        """Begin a phase."""
        if self.stays is not None and now > self.since_s:
            self._stayed(now)
        self.spend(self.phase, now - self.since_s)
        self.phase, self.since_s = phase, now

    def load(self, source: Source, now: float) -> None:
        """Begin to wait for pieces, the slowest of which come from `source`."""
        self.source = source
        self.enter(_LOADS[source], now)

    def spend(self, phase: Phase, seconds: float) -> None:
        """Add seconds to a phase."""
        if seconds > 0.0:
            self._spent_s[phase] = self._spent_s.get(phase, 0.0) + seconds

    def stepped(self, now: float, stalled: Phase | None, stalled_s: float, slowed_s: float) -> None:
        """A step that held the sequence has ended. stalled_s: wait for layers, in phase `stalled` (None: for its own
        load). slowed_s: delay by other KV transfers."""
        span_s = now - self.since_s
        stalled_s = min(stalled_s, span_s)
        slowed_s = min(slowed_s, span_s - stalled_s)
        self.spend(_LOADS[self.source] if stalled is None else stalled, stalled_s)
        self.spend(Phase.SLOWED, slowed_s)
        if self.stays is not None:
            self._stayed(now)
        self.since_s += stalled_s + slowed_s
        self.enter(Phase.OTHERS, now)

    def _stayed(self, now: float) -> None:
        assert self.stays is not None
        began_s = max(self.since_s, self.stays[-1][2]) if self.stays else self.since_s
        if self.stays and self.stays[-1][0] is self.phase and self.stays[-1][2] >= began_s:
            began_s = self.stays.pop()[1]
        if now > began_s and len(self.stays) < MOST_STAYS:
            self.stays.append((self.phase, began_s, now))

    def take(self, now: float, after: Phase) -> dict[Phase, float]:
        """Return the times and clear them. after: the next phase."""
        self.enter(after, now)
        taken, self._spent_s = self._spent_s, {}
        return taken
