"""Where one turn's time went: what the gateway measures and what workers tell, put together (`contracts.turn_times`).

The gateway is in one phase at a time. What it cannot see, from the submit to the first token, the worker tells with that token; what the
worker does not account for is PREPARE: the way there and back, and what came before its queue. So the phases until the first token add up
to the time to it, whatever a worker says. An attempt that is lost before its first token has told nothing: it is PREPARE too.
One that is lost later decoded until then, and the phases of the next one are counted after the first token.
"""

from __future__ import annotations

from collections.abc import Mapping

from contracts.turn_times import OF_WORKER, PHASES, WORDS, Phase, checked

_TOTAL = "total"


class TurnTimes:
    """One turn's record, in seconds by phase. Invariant: `until_first_s`, `after_s` and the span under way cover the time since it arrived,
    except where an old worker tells nothing (`spoke`)."""

    def __init__(self, arrived_s: float) -> None:
        self.arrived_s = arrived_s
        self.until_first_s: dict[Phase, float] = {}
        self.after_s: dict[Phase, float] = {}
        self._spoken = False
        self._phase, self._since_s = Phase.ADMIT, arrived_s
        self._accepted_s: float | None = None

    @property
    def spoken(self) -> bool:
        """The first token has come."""
        return self._spoken

    @property
    def waiting(self) -> bool:
        """The first token of an attempt is awaited."""
        return self._phase is Phase.PREPARE

    def enter(self, phase: Phase, now: float) -> None:
        """From now on."""
        self._spend(self._phase, now - self._since_s)
        self._phase, self._since_s, self._accepted_s = phase, now, None

    def accepted(self, now: float) -> None:
        """A worker has all of the request."""
        self._accepted_s = now

    def spoke(self, told: object, now: float) -> None:
        """The first token of an attempt has come. told: the worker's seconds by phase, unchecked; None: it is too old to tell, and only
        what passed until it accepted has a phase."""
        if told is None:
            until_s = now if self._accepted_s is None else self._accepted_s
            self._spend(Phase.PREPARE, until_s - self._since_s)
            self._since_s = now
        else:
            self._share(told, Phase.PREPARE, now)
        self._spoken = True
        self._phase, self._accepted_s = Phase.DECODE, None

    def ended(self, told: object, now: float) -> None:
        """The last token has come, after the first. told: the worker's seconds by phase since then, unchecked, or None."""
        self._share(told, Phase.DECODE, now)

    @property
    def first_token_s(self) -> float:
        """From its arrival to its first token, as far as it has phases."""
        return sum(self.until_first_s.values())

    def so_far(self, now: float) -> dict[Phase, float]:
        """What has passed before the first token; of the span under way what passed until the worker accepted."""
        until_s = now if self._accepted_s is None else self._accepted_s
        return _ordered(self.until_first_s, {self._phase: until_s - self._since_s})

    def whole(self) -> dict[Phase, float]:
        """Until its first token and after, in the order of the phases."""
        return _ordered(self.until_first_s, self.after_s)

    def validate(self) -> None:
        """Raise AssertionError when a phase has less than no time, or time came after a first token that did not come."""
        assert all(s >= 0.0 for s in (*self.until_first_s.values(), *self.after_s.values()))
        assert self._spoken or not self.after_s

    def _share(self, told: object, rest: Phase, now: float) -> None:
        """The span under way is the worker's phases and the rest. One that claims more than there was gets no more than that."""
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
    """As the header `Server-Timing` has it, in milliseconds. Numbers and our own words only: nothing in it is a client's."""
    total = [] if total_s is None else [f"{_TOTAL};dur={total_s * 1e3:.1f}"]
    return ", ".join([*total, *(f'{phase};dur={seconds * 1e3:.1f};desc="{WORDS[phase]}"' for phase, seconds in times.items())])
