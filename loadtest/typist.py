"""When people type: typing events for traces that have none, as SYMPHONY makes them (section 4, "Trace generation").

Decides, for every turn, how long its author types and hence when the hint goes out; and, while the load runs, when a turn
really starts, given when the answer before it really ended. A person reads the answer, then types: typing (and with it the
hint) starts no earlier than the previous answer's end, and the request follows when typing is done.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

#: Tokens of an English word, roughly.
TOKENS_PER_WORD = 1.3
#: Silent reading of English and typing on a keyboard, words a second (about 240 and 52 words a minute). SYMPHONY cites for them
#: Trauzettel-Klosinski and Dietz (IReST, 2012) and Pinet et al. (2022).
READ_WORDS_PER_S = 4.0
TYPE_WORDS_PER_S = 0.87
#: The mean time from the first key to the request.
MEAN_TYPING_S = 11.0
#: Spread of typing times: log-normal, so that most are short and a few are long.
_SIGMA = 0.6


@dataclass(frozen=True, slots=True)
class Moment:
    """When one turn's typing starts and when its request is sent; seconds on the load's clock."""

    typing_starts_s: float
    request_s: float


def typing_times(count: int, seed: int, mean_s: float = MEAN_TYPING_S) -> list[float]:
    """`count` typing times in seconds, log-normal with mean `mean_s`; equal for equal seeds."""
    rng = random.Random(seed)
    mu = math.log(mean_s) - _SIGMA**2 / 2
    return [rng.lognormvariate(mu, _SIGMA) for _ in range(count)]


def reading_time(answer_tokens: int) -> float:
    """Seconds that a person reads an answer of so many tokens."""
    return answer_tokens / TOKENS_PER_WORD / READ_WORDS_PER_S


def when_to_speak(arrival_s: float, typing_s: float, previous_end_s: float | None) -> Moment:
    """When a turn planned for `arrival_s` is typed and sent.

    A first turn (`previous_end_s` None) is typed just before its planned arrival. A later one is too, unless the answer
    before it ended after typing should have started: then typing starts at that end and the request is late by as much.
    """
    starts = arrival_s - typing_s
    if previous_end_s is None:
        return Moment(max(0.0, starts), arrival_s)
    if previous_end_s > starts:
        return Moment(previous_end_s, previous_end_s + typing_s)
    return Moment(starts, arrival_s)
