"""Typing times for traces that have none, as in SYMPHONY (section 4, "Trace generation").

Decides how long each turn is typed, and thus when its hint is sent; and when a turn starts, given when the previous
answer ended. Typing (and the hint) starts no earlier than the previous answer's end; the request follows when typing is
done.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

#: Tokens of an English word, roughly.
TOKENS_PER_WORD = 1.3
#: Silent reading of English and typing, about 240 and 52 words a minute. SYMPHONY's sources: Trauzettel-Klosinski and
#: Dietz (IReST, 2012), Pinet et al. (2022).
READ_WORDS_PER_S = 4.0
TYPE_WORDS_PER_S = 0.87
#: Mean time from the first key to the request, in seconds.
MEAN_TYPING_S = 11.0
#: Log-normal deviation of typing times.
_SIGMA = 0.6


@dataclass(frozen=True, slots=True)
class Moment:
    """Start of typing and time of the request of one turn, in seconds on the load's clock."""

    typing_starts_s: float
    request_s: float


def typing_times(count: int, seed: int, mean_s: float = MEAN_TYPING_S) -> list[float]:
    """`count` log-normal typing times in seconds, with mean `mean_s`; equal for equal seeds."""
    rng = random.Random(seed)
    mu = math.log(mean_s) - _SIGMA**2 / 2
    return [rng.lognormvariate(mu, _SIGMA) for _ in range(count)]


def reading_time(answer_tokens: int) -> float:
    """Seconds to read an answer."""
    return answer_tokens / TOKENS_PER_WORD / READ_WORDS_PER_S


def when_to_speak(arrival_s: float, typing_s: float, previous_end_s: float | None) -> Moment:
    """When a turn planned for `arrival_s` is typed and sent.

    Typing ends at the planned arrival. If the previous answer ended after typing should have started, typing starts at
    that end, and the request is late. previous_end_s: None for a first turn.
    """
    starts = arrival_s - typing_s
    if previous_end_s is None:
        return Moment(max(0.0, starts), arrival_s)
    if previous_end_s > starts:
        return Moment(previous_end_s, previous_end_s + typing_s)
    return Moment(starts, arrival_s)
