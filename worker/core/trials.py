"""Whose step it is while a request is here that may have killed an engine (`GenerateRequest.alone`).

Each such request has a trial: until its first new token, steps hold nothing else, so that an engine which dies then died of it. Gateways
are told whose trial it is before its first step, and that it is over before the next step of anybody else.

- One trial at a time, first of those that have had the fewest turns, then of those with the most tokens from a former worker: the newest
  request is the likeliest culprit, and the others get on before it has its turn.
- Trials follow each other for `ROUND_S`, and one lasts `TURN_S` at most. After that everybody else has as long, so that requests on trial
  take half of the engine at most, however many they are and however long their prompts.
- Between a word to the gateways and the step that it is about lie `TOLD_S`, in which it gets out of this process. Nothing runs then.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, TypeVar

TURN_S, ROUND_S = 1.0, 0.25
TOLD_S = 0.005


class Asked(Protocol):
    """What is asked of a request."""

    @property
    def request_id(self) -> str: ...
    @property
    def alone(self) -> bool: ...
    @property
    def resume_tokens(self) -> Collection[int]: ...


class Tried(Protocol):
    """What is asked of a sequence (`worker.core.sequence.Sequence`)."""

    @property
    def request(self) -> Asked: ...
    @property
    def generated(self) -> int: ...
    @property
    def arrival(self) -> int: ...


S = TypeVar("S", bound=Tried)


class Trials:
    """See the module. Invariant: a sequence on trial has had a turn, and is not past its first new token as far as was seen."""

    def __init__(self) -> None:
        #: Whose trial it is: a request's id, or empty. What gateways are to be told when it changes.
        self.told = ""
        self._told_s = float("-inf")
        self._began_s = self._round_s = 0.0
        self._others_until_s = float("-inf")
        #: By arrival: how many turns those that are here have had.
        self._turns: dict[int, int] = {}

    def turn(self, running: list[S], now: float) -> list[S]:
        """Those of `running` that the next step may hold."""
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
        self._tell(on.request.request_id if on is not None else "", now)
        if self.rest_s(now) is not None:
            return []
        return others if on is None else [on]

    def _tell(self, told: str, now: float) -> None:
        if told != self.told:
            self.told, self._told_s = told, now

    def rest_s(self, now: float) -> float | None:
        """How long no step may run; None: one may."""
        left_s = self._told_s + TOLD_S - now
        return left_s if left_s > 0 else None

    def validate(self) -> None:
        """Raise AssertionError when the invariant is broken."""
        assert all(turns >= 0 for turns in self._turns.values())
