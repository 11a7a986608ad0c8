"""How a trace's requests spread over models and time: the statistics that Prism publishes of its traces (section 3 and
A.1). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from loadtest.traces import TraceRequest

#: A model is active if it has received a request in this time (A.1).
ACTIVE_S = 120.0
#: Idle intervals are counted above this length (figure 13a).
IDLE_S = 10.0
_HOUR_S, _DAY_S = 3600.0, 86_400.0
#: Windows of the rate: for the variation (figure 13b), and for the correlation of days (the paper does not name one).
_MINUTE_S, _DAILY_S = 60.0, 300.0


@dataclass(frozen=True, slots=True)
class ModelStatistics:
    """Statistics of a trace; tuples have a number a model, busiest model first.

    active_share: mean share of models that are active. switches_per_hour: changes of the active set. idle_share: mean
    share of time in idle intervals. idle_per_hour: idle intervals. variation: standard deviation over mean of requests
    a minute. correlation: mean Pearson correlation of the rates of consecutive days; empty for less than two days.
    """

    models: int
    requests: int
    span_s: float
    active_share: float
    switches_per_hour: float
    idle_share: float
    idle_per_hour: tuple[float, ...]
    variation: tuple[float, ...]
    correlation: tuple[float, ...]


def statistics(
    requests: Sequence[TraceRequest], span_s: float | None = None, models: int | None = None
) -> ModelStatistics:
    """Statistics of `requests`, in any order, over [0, span_s).

    span_s: default: until the last request. models: number of deployed models, if some have no request. Raises
    ValueError if there are no requests, if a request is later than `span_s`, or if `models` are fewer than those named.
    """
    by_model: dict[str, list[float]] = {}
    for request in requests:
        by_model.setdefault(request.model, []).append(request.arrival_s)
    if not by_model:
        raise ValueError("the trace holds no requests")
    times = sorted((np.sort(np.asarray(each)) for each in by_model.values()), key=len, reverse=True)
    last_s = max(float(each[-1]) for each in times)
    span_s = last_s if span_s is None else span_s
    if not span_s > 0 or last_s > span_s:
        raise ValueError(f"span_s = {span_s:g}: must be above 0, and no request later; the last is at {last_s:g} s")
    count = len(times) if models is None else models
    if count < len(times):
        raise ValueError(f"models = {models}: the trace names {len(times)}; give at least that")
    silent = count - len(times)
    hours = span_s / _HOUR_S
    gaps = [np.diff(each, prepend=0.0, append=span_s) for each in times]
    return ModelStatistics(
        models=count,
        requests=len(requests),
        span_s=span_s,
        active_share=sum(_active_s(each, span_s) for each in times) / span_s / count,
        switches_per_hour=sum(_switches(each, span_s) for each in times) / hours,
        idle_share=(sum(float(each[each > IDLE_S].sum()) for each in gaps) / span_s + silent) / count,
        idle_per_hour=(*(int((each > IDLE_S).sum()) / hours for each in gaps), *([1 / hours] * silent)),
        variation=tuple(_variation(each, span_s) for each in times),
        correlation=tuple(r for each in times if (r := _correlation(each, span_s)) is not None),
    )


def _active_s(times: np.ndarray, span_s: float) -> float:
    return float(np.minimum(np.diff(times, append=span_s), ACTIVE_S).sum())


def _switches(times: np.ndarray, span_s: float) -> int:
    """Times that a model becomes active or ceases to be."""
    ends = int((np.diff(times, append=span_s) > ACTIVE_S).sum())
    begins = 1 + int((np.diff(times) > ACTIVE_S).sum())
    return begins + ends


def _rates(times: np.ndarray, window_s: float, windows: int) -> np.ndarray:
    return np.bincount((times / window_s).astype(int), minlength=windows)[:windows].astype(float)


def _variation(times: np.ndarray, span_s: float) -> float:
    rates = _rates(times, _MINUTE_S, max(1, int(span_s / _MINUTE_S)))
    mean = rates.mean()
    return float(rates.std() / mean) if mean else 0.0


def _correlation(times: np.ndarray, span_s: float) -> float | None:
    """None for less than two days, or if the rate is constant on one of each two days."""
    days, windows = int(span_s / _DAY_S), int(_DAY_S / _DAILY_S)
    rates = _rates(times, _DAILY_S, days * windows).reshape(days, windows)
    found = [float(np.corrcoef(a, b)[0, 1]) for a, b in pairwise(rates) if a.std() and b.std()]
    return sum(found) / len(found) if found else None
