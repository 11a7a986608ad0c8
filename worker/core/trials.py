"""Isolates requests that may have killed an engine (`GenerateRequest.alone`): decides which sequences a step may hold.

Each such request has a trial: until its first new token, steps hold nothing else, so if the engine dies, this request
is the cause. Gateways are told before a trial's first step which request is on trial, and before the next other step
that it is over.

- One trial at a time: the request with the fewest turns first, then the one with the most tokens from an earlier
  worker. The newest request is the likeliest cause, so the others go before it.
- Trials follow each other for `ROUND_S`; one lasts at most `TURN_S`. Then all other requests run for as long, so trials
  take at most half of the engine, whatever their number and length.
- Between the message to the gateways and its step lie `TOLD_S`, for the message to leave this process. Nothing runs
  then.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, TypeVar

TURN_S, ROUND_S = 1.0, 0.25
TOLD_S = 0.005


class Asked(Protocol):
    """The part of a request that trials need."""

    @property
    def request_id(self) -> str: ...
    @property
    def alone(self) -> bool: ...
    @property
    def resume_tokens(self) -> Collection[int]: ...


class Tried(Protocol):
    """The part of a sequence that trials need (`worker.core.sequence.Sequence`)."""

    @property
    def request(self) -> Asked: ...
    @property
    def generated(self) -> int: ...
    @property
    def arrival(self) -> int: ...


S = TypeVar("S", bound=Tried)


class Trials:
    """See the module. Invariant: a sequence on trial has had a turn and no new token since it was last checked."""

    def __init__(self) -> None:
        #: Id of the request on trial, or empty. Gateways are told when it changes.
        self.told = ""
        self._told_s = float("-inf")
        self._began_s = self._round_s = 0.0
        self._others_until_s = float("-inf")
        #: Number of turns of each sequence here, by arrival.
        self._turns: dict[int, int] = {}

    def turn(self, running: list[S], now: float) -> list[S]:
        """Sequences of `running` that the next step may hold."""
        if not self.told and not any(s.request.alone for s in running):
            return running if self.rest_s(now) is None else []
        trials = [s for s in running if s.request.alone and s.generated <= len(s.request.resume_tokens)]
        others = [s for s in running if s not in trials]
        self._turns = {s.arrival: self._turns.get(s.arrival, 0) for s in trials}
        on = next((s for s in trials if s.request.request_id == self.told), None)
        if self.told and (on is None or now - self._began_s >= TURN_S):
            if on is not None or now - self._round_s >= ROUND_S or not trials:
                self._others_until_s = now + TOLD_S + min(now - self._round_s, TURN_S)
            on = None
        if on is None and trials and (not others or now >= self._others_until_s):
            if not self.told:
                self._round_s = now
            on = min(trials, key=lambda s: (self._turns[s.arrival], -len(s.request.resume_tokens), s.arrival))
            self._turns[on.arrival] += 1
            self._began_s = now + TOLD_S
        self._announce(on.request.request_id if on is not None else "", now)
        if self.rest_s(now) is not None:
            return []
        return others if on is None else [on]

    def _announce(self, told: str, now: float) -> None:
        if told != self.told:
            self.told, self._told_s = told, now

    def rest_s(self, now: float) -> float | None:
        """Seconds for which no step may run; None: one may run now."""
        left_s = self._told_s + TOLD_S - now
        return left_s if left_s > 0 else None

    def validate(self) -> None:
        """Raise AssertionError when the invariant is broken."""
        assert all(turns >= 0 for turns in self._turns.values())
