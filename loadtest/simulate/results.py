"""Figures of a simulated run: latencies, rates and load balance. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from loadtest.figures import spread
from loadtest.simulate.request import Request


def peak_to_median(loads: Sequence[Sequence[float]]) -> dict[str, float | int]:
    """Peak over median load of the nodes. loads: requests, a row a moment, a column a node.

    over_time: mean of the moments' peaks over the mean of their medians, so that idle moments weigh little. mean, p95,
    max: of the moments' ratios, where the median is at least one request. whole_run: the highest load of any node over
    the median of all nodes and moments (our reading of SYMPHONY, figure 15).
    """
    table = np.asarray(loads, dtype=float)
    if not table.size or not table.any():
        return {"moments": len(table)}
    peaks, medians = table.max(axis=1), np.median(table, axis=1)
    busy = medians >= 1.0
    found: dict[str, float | int] = {"moments": len(table)}
    if medians.sum() > 0:
        found["over_time"] = round(float(peaks.sum() / medians.sum()), 4)
    if busy.any():
        ratios = peaks[busy] / medians[busy]
        found |= {
            "mean": round(float(ratios.mean()), 4),
            "p95": round(float(np.percentile(ratios, 95)), 4),
            "max": round(float(ratios.max()), 4),
        }
    if np.median(table) > 0:
        found["whole_run"] = round(float(table.max() / np.median(table)), 4)
    return found


def loads_of(spans: Iterable[tuple[float, float, int]], nodes: int, window_s: float) -> list[list[float]]:
    """Mean requests on each node by window, from (start, end, node) of each request; for measured runs."""
    found = list(spans)
    if not found:
        return []
    start_s, end_s = min(s for s, _, _ in found), max(e for _, e, _ in found)
    table = np.zeros((int((end_s - start_s) / window_s) + 1, nodes))
    for begin, end, node in found:
        first, last = int((begin - start_s) / window_s), int((end - start_s) / window_s)
        for w in range(first, last + 1):
            low, high = start_s + w * window_s, start_s + (w + 1) * window_s
            table[w, node] += max(0.0, min(end, high) - max(begin, low)) / window_s
    return [[float(v) for v in row] for row in table]


def latencies(requests: Sequence[Request]) -> dict[str, Any]:
    """Latencies in seconds of ended requests. normalised: end to end over output tokens."""
    return {
        "requests": len(requests),
        "ttft_s": spread(r.first_s - r.sent_s for r in requests),
        "ttft_returning_turns_s": spread(r.first_s - r.sent_s for r in requests if r.turn),
        "waits_s": _waits(requests),
        "waits_returning_turns_s": _waits([r for r in requests if r.turn]),
        "tpot_s": spread((r.end_s - r.first_s) / (r.answer_tokens - 1) for r in requests if r.answer_tokens > 1),
        "normalised_s": spread((r.end_s - r.sent_s) / r.answer_tokens for r in requests),
        "end_to_end_s": spread(r.end_s - r.sent_s for r in requests),
    }


def _waits(requests: Sequence[Request]) -> dict[str, float]:
    """Mean seconds by phase until the first token, longest first."""
    total: Counter[str] = Counter()
    for request in requests:
        total.update({str(phase): seconds for phase, seconds in request.waits.items()})
    return {phase: round(seconds / len(requests), 6) for phase, seconds in total.most_common()}


def figures(
    requests: Sequence[Request], loads: Sequence[Sequence[float]], warm_up_s: float, until_s: float
) -> dict[str, Any]:
    """All figures of one run. Requests sent before `warm_up_s` are not counted; rates count ends from then to
    `until_s`."""
    ended = [r for r in requests if r.end_s >= 0 and r.sent_s >= warm_up_s]
    span_s = until_s - warm_up_s
    within = [r for r in requests if warm_up_s <= r.end_s <= until_s]
    returning = [r for r in ended if r.turn]
    history = sum(r.history_tokens for r in returning)
    found = latencies(ended) | {
        "unfinished": sum(r.end_s < 0 for r in requests),
        "span_s": round(span_s, 3),
        "requests_per_s": round(len(within) / span_s, 4) if span_s else 0.0,
        "output_tokens_per_s": round(sum(r.answer_tokens for r in within) / span_s, 3) if span_s else 0.0,
        "cached_share_returning": round(sum(r.cached_tokens for r in returning) / history, 4) if history else None,
        "peak_to_median": peak_to_median(loads),
    }
    priorities = sorted({r.priority for r in ended})
    if len(priorities) > 1:
        found["by_priority"] = {str(p): latencies([r for r in ended if r.priority == p]) for p in priorities}
    tenants = sorted({r.session.tenant for r in ended})
    if len(tenants) > 1:
        found["by_tenant"] = {t: latencies([r for r in ended if r.session.tenant == t]) for t in tenants}
    return found
