"""Figures of simulated autoscaling by stretch of time, and of the whole run. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np

from loadtest.figures import Slo
from loadtest.simulate.request import Request
from loadtest.simulate.scaled import Ran, kept_targets
from scheduler.core.scale_signals import TPOT, TTFT

#: Stretches that a run is divided into, and their shortest length.
STRETCHES, SHORTEST_S = 12, 60.0


def stretch_s(span_s: float) -> float:
    """Length of a stretch: whole minutes, at most `STRETCHES` of them."""
    return max(math.ceil(span_s / STRETCHES / SHORTEST_S), 1) * SHORTEST_S


def node_seconds(paid: Sequence[tuple[float, int]], begin_s: float, end_s: float) -> float:
    """Node-seconds that were paid for between two times. paid: (time, nodes) at each change, by time."""
    total = 0.0
    for number, (at_s, nodes) in enumerate(paid):
        until_s = paid[number + 1][0] if number + 1 < len(paid) else end_s
        total += nodes * max(min(until_s, end_s) - max(at_s, begin_s), 0.0)
    return total


def most_nodes(ran: Ran) -> int:
    """The most nodes that were paid for at a time."""
    return max(nodes for _, nodes in ran.fleet.paid)


def whole(ran: Ran, slo: Slo, until_s: float) -> dict[str, Any]:
    """Figures of a run until `until_s`: attainment, latencies, node-hours, moves. Requests that never ended keep to no
    target."""
    return _of(ran.requests, slo) | {
        "node_hours": round(node_seconds(ran.fleet.paid, 0.0, until_s) / 3600, 4),
        "nodes": {"least": min(nodes for _, nodes in ran.fleet.paid), "most": most_nodes(ran)},
        "caches_moved": len(ran.fleet.moves.at_s),
        "caches_moved_as_their_node_left": len(ran.fleet.moves.left_at_s),
        "unfinished": sum(r.end_s < 0 for r in ran.requests),
    }


def stretches(ran: Ran, slo: Slo, until_s: float, length_s: float) -> list[dict[str, Any]]:
    """The same by stretch: of the requests that arrived in it. load: demand, in nodes' worth of work or memory."""
    found = []
    for number in range(max(math.ceil(until_s / length_s), 1)):
        begin_s, end_s = number * length_s, min((number + 1) * length_s, until_s)
        looks = [look for look in ran.fleet.looks if begin_s <= look.at_s < end_s]
        serving = [look.serving for look in looks]
        found.append(
            {
                "begin_s": begin_s,
                "end_s": round(end_s, 3),
                "load": round(float(np.mean([look.demand for look in looks])), 4) if looks else None,
                "nodes": round(node_seconds(ran.fleet.paid, begin_s, end_s) / max(end_s - begin_s, 1e-9), 3),
                "serving": {"least": min(serving, default=0), "most": max(serving, default=0)},
                "kv_needed": {
                    "hbm": round(max((look.hbm_needed for look in looks), default=0.0), 4),
                    "dram": round(max((look.dram_needed for look in looks), default=0.0), 4),
                },
                "caches_moved": _within(ran.fleet.moves.at_s, begin_s, end_s),
                "caches_moved_as_their_node_left": _within(ran.fleet.moves.left_at_s, begin_s, end_s),
                **_of([r for r in ran.requests if begin_s <= r.sent_s < end_s], slo),
            }
        )
    return found


def _of(requests: Sequence[Request], slo: Slo) -> dict[str, Any]:
    ended = [r for r in requests if r.end_s >= 0]
    first_s = [r.first_s - r.sent_s for r in ended]
    kept = [kept_targets(r, slo) for r in ended]
    return {
        "requests": len(requests),
        "ttft_s": {
            "p50": round(float(np.percentile(first_s, 50)), 4) if ended else None,
            "p99": round(float(np.percentile(first_s, 99)), 4) if ended else None,
        },
        "attainment": {target: _share(kept, target, len(requests) - len(ended)) for target in (TTFT, TPOT)},
    }


def _share(kept: Sequence[dict[str, bool]], target: str, missed: int) -> float | None:
    counted = [of[target] for of in kept if target in of]
    turns = len(counted) + missed
    return round(sum(counted) / turns, 4) if turns else None


def _within(times: Sequence[float], begin_s: float, end_s: float) -> int:
    """How many of these ascending times are in the stretch."""
    return bisect_left(times, end_s) - bisect_left(times, begin_s)
