"""Memory, window, shares and latency over time while the batch is set (figures 13 and 14)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from bench.harli.arms import harvesting
from bench.harli.devices import Pair
from bench.harli.loads import SetBatch, phases
from loadtest.simulate.events import Events
from loadtest.simulate.harvested import HarvestedGpu, StepSeen

#: Points of each phase in the results.
_POINTS = 8


def controlled(pair: Pair, quick: bool, seed: int) -> dict[str, Any]:
    """One GPU, the paper's three loads."""
    harvest, _ = harvesting(pair, seed)
    events, steps = Events(), list[StepSeen]()
    gpu = HarvestedGpu(pair.kind, events, harvest, pair.training(), seed, steps.append)
    wanted = list(phases(quick))
    load = SetBatch(events, gpu.submit, wanted)
    end_s = sum(seconds for _, seconds in wanted)
    events.run(lambda: False, limit_s=end_s)
    gpu.core.validate()
    ends_s = list(accumulate((seconds for _, seconds in wanted), initial=0.0))
    rows = []
    for (running, _), (begin_s, over_s) in zip(wanted, pairwise(ends_s), strict=True):
        # The first tenth is the change from the load before.
        inside = [s for s in steps if begin_s + (over_s - begin_s) / 10 <= s.begin_s < over_s]
        rows.append({"load": running} | _means(pair, inside))
    every = end_s / (3 * _POINTS)
    points = [
        {"at_s": round(n * every, 1)} | _means(pair, [s for s in steps if n * every <= s.begin_s < (n + 1) * every])
        for n in range(3 * _POINTS)
    ]
    assert load.wanted == wanted[-1][0]
    return {
        "gpu": pair.gpu,
        "layers": pair.work.shape.layers,
        "loads": rows,
        "points": points,
        "fixed_gb": round(pair.work.fixed_bytes / 1e9, 2),
        "changes_every_s": round(end_s / max(harvest.counts.changes, 1), 2),
    }


def _means(pair: Pair, steps: Sequence[StepSeen]) -> dict[str, Any]:
    seconds = sum(s.seconds for s in steps)

    def mean(value: Any) -> float:
        return float(sum(value(s) * s.seconds for s in steps) / seconds)

    late = sum(s.running for s in steps if s.seconds > pair.kind.target_s) / sum(s.running for s in steps)
    beside, whole = [s for s in steps if s.split.training], [s for s in steps if not s.split.training]
    return {
        "running": round(mean(lambda s: s.running), 1),
        "kv_gb": round(mean(lambda s: s.used_bytes) / 1e9, 2),
        "window": round(mean(lambda s: s.window), 1),
        "window_gb": round(mean(lambda s: s.window) * pair.work.layer_bytes / 1e9, 2),
        "infer": round(mean(lambda s: s.split.infer) / pair.kind.shares, 3),
        "training": round(mean(lambda s: s.split.training) / pair.kind.shares, 3),
        "latency_ms": round(1000 * mean(lambda s: s.seconds), 2),
        "beside_ms": _mean_ms(beside),
        "whole_ms": _mean_ms(whole),
        "whole_part": round(len(whole) / len(steps), 4),
        "late": round(late, 5),
    }


def _mean_ms(steps: Sequence[StepSeen]) -> float | None:
    return round(1000 * sum(s.seconds for s in steps) / len(steps), 2) if steps else None
