"""The requests of a pair of stretches, and when enough pairs were measured. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import median

import numpy as np

from bench.many_models.setting import TIME_SCALE, token_bytes
from loadtest.bursts import Burstiness
from loadtest.traces import TraceRequest

#: Elastic may take so many times as long as static (Prism, figure 14).
BOUND = 1.04
#: Of the intervals. They are looked at after every pair, so 95 % would be wrong more often than that.
CONFIDENCE = 0.99
#: Pairs before which nothing is decided.
LEAST = 10
#: Shape of the gamma distribution of gaps between a model's requests: steadier than Poisson.
_STEADINESS = 4.0
_DRAWS = 4000


def constant_load(models: int, per_s: float, seconds: float, tokens: tuple[int, int], seed: int) -> list[TraceRequest]:
    """Requests to models `m00`, `m01`, … for `seconds`, `per_s` a second to each, one at least. tokens: of each prompt
    and answer. No two prompts share text. Arrivals are in the trace's time (`bench.many_models.setting.TIME_SCALE`)."""
    found: list[TraceRequest] = []
    for model in range(models):
        rng = random.Random(f"{seed} {model}")
        at_s, gaps = rng.random() * min(1 / per_s, seconds), Burstiness(_STEADINESS, per_s)
        while at_s < seconds:
            found.append(TraceRequest(at_s / TIME_SCALE, *tokens, (), model=f"m{model:02d}"))
            at_s += gaps.gap(rng)
    found.sort(key=lambda r: r.arrival_s)
    return [_of_block(request, number) for number, request in enumerate(found)]


def _of_block(request: TraceRequest, block: int) -> TraceRequest:
    return TraceRequest(request.arrival_s, request.input_tokens, request.output_tokens, (block,), model=request.model)


def fills(shape: str, bytes_: int, tokens: tuple[int, int]) -> int:
    """Number of requests whose KV fills so many bytes."""
    return -(-bytes_ // (sum(tokens) * token_bytes(shape)))


def interval(ratios: Sequence[float], seed: int = 1) -> tuple[float, float, float]:
    """The median of the pairs' ratios, and its bootstrap interval."""
    values = np.asarray(ratios)
    drawn = np.random.default_rng(seed).choice(values, (_DRAWS, len(values)))
    low, high = np.quantile(np.median(drawn, axis=1), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return median(ratios), float(low), float(high)


def within(ratios: Sequence[float]) -> bool | None:
    """Whether the median ratio is at most `BOUND`; None: it takes more pairs to say so."""
    if len(ratios) < LEAST:
        return None
    _, low, high = interval(ratios)
    if high <= BOUND:
        return True
    return False if low > BOUND else None
