"""Figures of a load's outcomes: latencies, rates, cache hits, imbalance and hint timing. Pure.

Plain numbers for JSON, with units in their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loadtest.client import Outcome


def spread(values: Iterable[float]) -> dict[str, float | int]:
    """count, mean, p50, p95 and p99 of `values`, rounded to six decimals; only the count if there are none."""
    data = np.asarray(list(values), dtype=float)
    if not len(data):
        return {"count": 0}
    p50, p95, p99 = np.percentile(data, [50, 95, 99])
    named = {"mean": data.mean(), "p50": p50, "p95": p95, "p99": p99}
    return {"count": len(data), **{name: round(float(value), 6) for name, value in named.items()}}


@dataclass(frozen=True, slots=True)
class Slo:
    """A latency objective: TTFT at most `ttft_s`, mean TPOT at most `tpot_s`; None: no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def kept(self, outcome: Outcome) -> bool:
        """Whether this request met it; failed requests did not."""
        if outcome.error is not None or (self.ttft_s is not None and outcome.ttft_s > self.ttft_s):
            return False
        return self.tpot_s is None or (outcome.tpot_s or 0.0) <= self.tpot_s


def figures(outcomes: Sequence[Outcome], nodes: int, window_s: float, slo: Slo | None = None) -> dict[str, Any]:
    """All figures of one run. nodes: number that could have served. window_s: length of the windows of imbalance."""
    good = [o for o in outcomes if o.error is None]
    span_s = max((o.end_s for o in outcomes), default=0.0) - min((o.sent_s for o in outcomes), default=0.0)
    told = [o for o in good if o.cached_tokens is not None]
    prompt_tokens = sum(o.prompt_tokens for o in told)
    returning = [o for o in told if o.turn]
    found = {
        "requests": len(outcomes),
        "failed": len(outcomes) - len(good),
        "errors": sorted({o.error for o in outcomes if o.error is not None})[:5],
        "span_s": round(span_s, 3),
        "requests_per_s": round(len(good) / span_s, 4) if span_s else 0.0,
        "ttft_s": spread(o.ttft_s for o in good),
        "ttft_first_turns_s": spread(o.ttft_s for o in good if o.turn == 0),
        "ttft_returning_turns_s": spread(o.ttft_s for o in good if o.turn),
        "tpot_s": spread(o.tpot_s for o in good if o.tpot_s is not None),
        "end_to_end_s": spread(o.end_to_end_s for o in good),
        "normalised_s": spread(o.normalised_s for o in good if o.normalised_s is not None),
        "output_tokens_per_s": round(sum(o.output_tokens for o in good) / span_s, 3) if span_s else 0.0,
        "prompt_tokens": sum(o.prompt_tokens for o in good),
        "output_tokens": sum(o.output_tokens for o in good),
        "cached_share": round(sum(o.cached_tokens or 0 for o in told) / prompt_tokens, 4) if prompt_tokens else None,
        "cached_share_returning": _share(returning),
        "lateness_s": spread(o.sent_s - o.planned_s for o in good),
        "imbalance": imbalance(good, nodes, window_s),
        "hints": hint_timing(good),
    }
    if slo is not None:
        kept = sum(slo.kept(o) for o in outcomes)
        found["slo_attainment"] = round(kept / len(outcomes), 4) if outcomes else None
        found["goodput_per_s"] = round(kept / span_s, 4) if span_s else 0.0
    for name, of in (
        ("by_priority", lambda o: str(o.priority)),
        ("by_tenant", lambda o: o.tenant),
        ("by_model", lambda o: o.model),
    ):
        found |= _apart(good, name, of)
    return found


def _apart(outcomes: Sequence[Outcome], name: str, of: Callable[[Outcome], str]) -> dict[str, Any]:
    """Latencies by kind of request, if there are several kinds."""
    kinds = sorted({of(o) for o in outcomes})
    if len(kinds) < 2:
        return {}
    groups = {kind: [o for o in outcomes if of(o) == kind] for kind in kinds}
    return {
        name: {
            kind: {
                "requests": len(group),
                "ttft_s": spread(o.ttft_s for o in group),
                "tpot_s": spread(o.tpot_s for o in group if o.tpot_s is not None),
                "end_to_end_s": spread(o.end_to_end_s for o in group),
            }
            for kind, group in groups.items()
        }
    }


def imbalance(outcomes: Sequence[Outcome], nodes: int, window_s: float) -> dict[str, Any]:
    """Load imbalance of the nodes, maximum over mean: 1 is even, `nodes` is all on one.

    For requests started, and for outstanding work (seconds that requests spend on a node): averaged over windows,
    weighted by each window's total; and over the whole run.
    """
    placed = [o for o in outcomes if o.node is not None]
    names = sorted({o.node for o in placed if o.node is not None})
    result: dict[str, Any] = {
        "window_s": round(window_s, 3),
        "requests_by_node": {name: sum(o.node == name for o in placed) for name in names},
    }
    if not placed or window_s <= 0:
        return result
    start_s, end_s = min(o.sent_s for o in placed), max(o.end_s for o in placed)
    windows = int((end_s - start_s) / window_s) + 1
    starts, work = np.zeros((windows, max(nodes, len(names)))), np.zeros((windows, max(nodes, len(names))))
    for o in placed:
        column = names.index(o.node or "")
        first, last = (int((t - start_s) / window_s) for t in (o.sent_s, o.end_s))
        starts[first, column] += 1
        for w in range(first, last + 1):
            lo, hi = start_s + w * window_s, start_s + (w + 1) * window_s
            work[w, column] += max(0.0, min(o.end_s, hi) - max(o.sent_s, lo))
    return result | {
        "requests": round(_mean_ratio(starts), 4),
        "outstanding": round(_mean_ratio(work), 4),
        "requests_whole_run": round(_mean_ratio(starts.sum(axis=0, keepdims=True)), 4),
        "outstanding_whole_run": round(_mean_ratio(work.sum(axis=0, keepdims=True)), 4),
    }


def hint_timing(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Numbers of hints sent, accepted, and answered in time; lead_s: from a hint to its request."""
    hinted = [(o, o.hint) for o in outcomes if o.hint is not None]
    return {
        "sent": len(hinted),
        "accepted": sum(h.status == 202 for _, h in hinted),
        "answered_before_request": sum(h.status == 202 and h.answered_s <= o.sent_s for o, h in hinted),
        "lead_s": spread(o.sent_s - h.sent_s for o, h in hinted),
        "answer_s": spread(h.answered_s - h.sent_s for _, h in hinted),
    }


def _mean_ratio(table: Any) -> float:
    """max/mean of each row, averaged with the rows' sums as weights."""
    sums = table.sum(axis=1)
    busy = table[sums > 0]
    if not len(busy):
        return 1.0
    return float(np.average(busy.max(axis=1) / busy.mean(axis=1), weights=busy.sum(axis=1)))


def _share(outcomes: Sequence[Outcome]) -> float | None:
    tokens = sum(o.prompt_tokens for o in outcomes)
    return round(sum(o.cached_tokens or 0 for o in outcomes) / tokens, 4) if tokens else None
