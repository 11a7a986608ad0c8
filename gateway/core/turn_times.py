"""Combines the gateway's and the workers' times of one turn (`contracts.turn_times`).

The gateway is in one phase at a time. The worker reports its phases from submit to first token with that token; the
rest of this span is PREPARE (the way there and back, and work before the worker's queue). So the phases until the first
token add up to the time to it, whatever the worker reports. An attempt lost before its first token is PREPARE; one lost
later is DECODE until then, and the phases of the next attempt count as after the first token.
"""

from __future__ import annotations

from collections.abc import Mapping

from contracts.turn_times import OF_WORKER, PHASES, WORDS, Phase, checked

_TOTAL = "total"


class TurnTimes:
    """One turn's seconds by phase. Invariant: `until_first_s`, `after_s` and the current span cover the time since its
    arrival, unless an old worker reports nothing (`spoke`)."""

    def __init__(self, arrived_s: float) -> None:
        self.arrived_s = arrived_s
        self.until_first_s: dict[Phase, float] = {}
        self.after_s: dict[Phase, float] = {}
        self._spoken = False
        self._phase, self._since_s = Phase.ADMIT, arrived_s
        self._accepted_s: float | None = None

    @property
    def spoken(self) -> bool:
        """Whether the first token has arrived."""
        return self._spoken

    @property
    def waiting(self) -> bool:
        """Whether an attempt waits for its first token."""
        return self._phase is Phase.PREPARE

    def enter(self, phase: Phase, now: float) -> None:
        """The current phase ends, and `phase` begins."""
        self._spend(self._phase, now - self._since_s)
        self._phase, self._since_s, self._accepted_s = phase, now, None

    def accepted(self, now: float) -> None:
        """A worker has accepted the request."""
        self._accepted_s = now

    def spoke(self, told: object, now: float) -> None:
        """The first token of an attempt has arrived. told: the worker's seconds by phase, unchecked; None: the worker
        is too old to report, so only the time until it accepted is counted."""
        if told is None:
            until_s = now if self._accepted_s is None else self._accepted_s
            self._spend(Phase.PREPARE, until_s - self._since_s)
            self._since_s = now
        else:
            self._share(told, Phase.PREPARE, now)
        self._spoken = True
        self._phase, self._accepted_s = Phase.DECODE, None

    def ended(self, told: object, now: float) -> None:
        """The last token has arrived. told: the worker's seconds by phase since the first, unchecked, or None."""
        self._share(told, Phase.DECODE, now)

    @property
    def first_token_s(self) -> float:
        """Seconds from arrival to first token, as far as they are counted."""
        return sum(self.until_first_s.values())

    def so_far(self, now: float) -> dict[Phase, float]:
        """Phases before the first token; of the current span only the time until the worker accepted."""
        until_s = now if self._accepted_s is None else self._accepted_s
        return _ordered(self.until_first_s, {self._phase: until_s - self._since_s})

    def whole(self) -> dict[Phase, float]:
        """All phases, in order."""
        return _ordered(self.until_first_s, self.after_s)

    def validate(self) -> None:
        """Raise AssertionError for a negative phase, or for time after the first token without a first token."""
        assert all(s >= 0.0 for s in (*self.until_first_s.values(), *self.after_s.values()))
        assert self._spoken or not self.after_s

    def _share(self, told: object, rest: Phase, now: float) -> None:
        """Divide the current span into the worker's phases and `rest`. Phases that exceed the span are scaled down."""
        span_s = max(now - self._since_s, 0.0)
        said = checked(told, OF_WORKER)
        claimed_s = sum(said.values())
        scale = min(1.0, span_s / claimed_s) if claimed_s else 0.0
        for phase, seconds in said.items():
            self._spend(phase, seconds * scale)
        self._spend(rest, span_s - claimed_s * scale)
        self._since_s = now

    def _spend(self, phase: Phase, seconds: float) -> None:
        if seconds > 0.0:
            spent = self.after_s if self._spoken else self.until_first_s
            spent[phase] = spent.get(phase, 0.0) + seconds


def _ordered(*parts: Mapping[Phase, float]) -> dict[Phase, float]:
    sums: dict[Phase, float] = {}
    for part in parts:
        for phase, seconds in part.items():
            sums[phase] = sums.get(phase, 0.0) + seconds
    return {phase: sums[phase] for phase in PHASES if sums.get(phase, 0.0) > 0.0}


def server_timing(times: Mapping[Phase, float], total_s: float | None = None) -> str:
    """The value of the header `Server-Timing`, in milliseconds. It contains no client input."""
    total = [] if total_s is None else [f"{_TOTAL};dur={total_s * 1e3:.1f}"]
    return ", ".join(
        [*total, *(f'{phase};dur={seconds * 1e3:.1f};desc="{WORDS[phase]}"' for phase, seconds in times.items())]
    )
