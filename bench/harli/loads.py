"""Requests: a trace's, or a generated one with the rate and lengths of Azure's conversation trace; and a load whose
batch is set (section 8.5)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from contracts.ids import DEFAULT_TENANT, SessionKey
from loadtest.simulate.events import Events
from loadtest.simulate.request import Request
from loadtest.traces import TraceRequest, read_trace

#: Of Azure's conversation trace of 2023: requests a second, mean prompt and answer, deviations of their
#: logarithms; longest prompt (ours) and answer; intervals whose rates differ as its do.
_RATE, _PROMPT, _ANSWER, _PROMPT_SIGMA, _ANSWER_SIGMA = 5.5, 1155.0, 211.0, 0.99, 0.86
_MOST_PROMPT, _MOST_ANSWER = 4096, 1000
_BURST_S = 20.0
#: Tokens of a request where the batch is set.
SET_PROMPT, SET_ANSWER = 1500, 400


def requests_of(trace: Path | None, seconds: float, seed: int) -> list[TraceRequest]:
    """The first `seconds` of a trace, or generated ones. Raises TraceError and OSError."""
    if trace is not None:
        return [r for r in read_trace(trace) if r.arrival_s < seconds]
    dice, found = random.Random(f"{seed} harli"), list[TraceRequest]()
    for begin in range(0, int(seconds), int(_BURST_S)):
        rate, at = _RATE * dice.uniform(0.55, 1.45), float(begin)
        while (at := at + dice.expovariate(rate)) < min(begin + _BURST_S, seconds):
            prompt = min(round(_drawn(dice, _PROMPT, _PROMPT_SIGMA)) + 1, _MOST_PROMPT)
            answer = min(round(_drawn(dice, _ANSWER, _ANSWER_SIGMA)) + 1, _MOST_ANSWER)
            found.append(TraceRequest(at, prompt, answer, ()))
    return found


def _drawn(dice: random.Random, mean: float, sigma: float) -> float:
    """Log-normal with this mean."""
    return mean * dice.lognormvariate(-sigma * sigma / 2, sigma)


class SetBatch:
    """Keeps so many requests running, each phase for some seconds: as one ends, the next one comes."""

    def __init__(self, events: Events, submit: Callable[[Request], None], phases: Sequence[tuple[int, float]]) -> None:
        self._events, self._submit = events, submit
        self.wanted = self._running = self._made = 0
        self._dice = random.Random("batch")
        at = 0.0
        for running, seconds in phases:
            events.at(at, lambda running=running: self._want(running))  # type: ignore[misc]
            at += seconds

    def _want(self, running: int) -> None:
        self.wanted = running
        self._fill()

    def _fill(self) -> None:
        while self._running < self.wanted:
            self._running += 1
            self._made += 1
            # The first ones end at different times.
            answer = self._dice.randint(SET_ANSWER // 4, SET_ANSWER * 7 // 4)
            name = f"s{self._made}"
            session = SessionKey(DEFAULT_TENANT, name)
            self._submit(Request(name, session, 0, SET_PROMPT, 0, answer, self._events.now, self._over))

    def _over(self, request: Request) -> None:
        self._running -= 1
        self._events.at(self._events.now, self._fill)


def phases(quick: bool) -> Iterator[tuple[int, float]]:
    """The paper's: light, heavy and medium load."""
    for running in (8, 42, 24):
        yield running, 6.0 if quick else 40.0
