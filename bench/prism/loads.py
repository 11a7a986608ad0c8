"""Traces of many models, drawn from what Prism says of its own, which may not be redistributed.

Models are busy in bursts: requests come as a Poisson process while a model is on. Times on and off are exponential, of
20 and 40 s, for every fourth model of 80 and 20 s. So a model has 40 to 100 idle intervals above 10 s an hour, as in
section A.1, and about half of the models have had a request in the last 10 s; in the paper 23 to 50 % of more models
have had one in the last two minutes. Popularity is a Zipf distribution. A scale multiplies the number of requests and
keeps the pattern, as in section 7.1.

Two kinds of requests. `chat`: table 2 has 420 tokens a request, of which (E2E - TTFT) / TPOT = 274 are answered.
`api`: longer prompts; "more bursty and heavier" is all that section 7.2 says of the Hyperbolic trace (ours: 1,000 and
300). Lengths are log-normal.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.simulate.many import ModelRequest

#: Mean seconds on and off, of models and of every fourth one.
_TIMES_S, _POPULAR_S = (20.0, 40.0), (80.0, 20.0)
_ZIPF, _SIGMA, _MOST_TOKENS = 1.0, 1.0, 8192


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of requests: mean tokens."""

    name: str
    input_tokens: float
    output_tokens: float


CHAT, API = Kind("chat", 146.0, 274.0), Kind("api", 1000.0, 300.0)


def trace(models: Sequence[str], kind: Kind, rate: float, seconds: float, seed: int) -> list[ModelRequest]:
    """Requests for these models, `rate` a second in all in the mean. The n-th model is the n-th most popular."""
    dice = random.Random(f"{seed} {kind.name}")
    weights = [1.0 / (1 + n) ** _ZIPF for n in range(len(models))]
    found: list[ModelRequest] = []
    for number, model in enumerate(models):
        on_s, off_s = _POPULAR_S if number % 4 == 0 else _TIMES_S
        share = on_s / (on_s + off_s)
        bursts, time_s, on = list[tuple[float, float]](), 0.0, dice.random() < share
        while time_s < seconds:
            lasts_s = dice.expovariate(1.0 / (on_s if on else off_s))
            if on:
                bursts.append((time_s, min(time_s + lasts_s, seconds)))
            time_s, on = time_s + lasts_s, not on
        active_s = sum(end - begin for begin, end in bursts)
        # Every trace has its mean rate, whatever the bursts.
        each = rate * weights[number] / sum(weights) * seconds / active_s if active_s else 0.0
        each_of = random.Random(f"{seed} {kind.name} {model}")
        for begin, end in bursts:
            at = begin
            while each and (at := at + each_of.expovariate(each)) < end:
                found.append(
                    ModelRequest(
                        at, model, _tokens(each_of, kind.input_tokens), max(_tokens(each_of, kind.output_tokens), 2)
                    )
                )
    return sorted(found, key=lambda asked: asked.time_s)


def _tokens(dice: random.Random, mean: float) -> int:
    return min(max(round(dice.lognormvariate(math.log(mean) - _SIGMA**2 / 2, _SIGMA)), 1), _MOST_TOKENS)


def described(requests: Sequence[ModelRequest], models: Sequence[str], seconds: float) -> dict[str, float]:
    """Statistics of a trace, as the paper's section 3: share of models with a request in the last two minutes, changes
    of that set an hour, idle intervals above 10 s an hour and model."""
    times = {model: [r.time_s for r in requests if r.model == model] for model in models}
    gaps = sum(b - a > 10.0 for each in times.values() for a, b in zip([0.0, *each], [*each, seconds], strict=True))
    moments = [float(t) for t in range(10, int(seconds), 5)]
    sets = [frozenset(m for m, each in times.items() if _any_in(each, t - 120.0, t)) for t in moments]
    busy = sum(len(one) for one in sets) / max(len(sets) * len(models), 1)
    now = sum(_any_in(each, t - 10.0, t) for t in moments for each in times.values())
    return {
        "requests": len(requests),
        "active_share_120_s": round(busy, 3),
        "active_share_10_s": round(now / max(len(moments) * len(models), 1), 3),
        "switches_an_hour": round(sum(a != b for a, b in itertools.pairwise(sets)) * 3600 / seconds, 1),
        "idle_intervals_an_hour": round(gaps / len(models) * 3600 / seconds, 1),
        "mean_input_tokens": round(sum(r.input_tokens for r in requests) / max(len(requests), 1), 1),
        "mean_output_tokens": round(sum(r.output_tokens for r in requests) / max(len(requests), 1), 1),
    }


def _any_in(times: Sequence[float], after_s: float, until_s: float) -> bool:
    """Whether one of these ascending times is in the interval."""
    return bisect.bisect_right(times, after_s) < bisect.bisect_right(times, until_s)
