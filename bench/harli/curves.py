"""Curves of the simulated device: latency by batch and length (figure 8) and by both shares (figure 10)."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

from bench.harli.devices import Pair
from bench.harli.profiling import Held, profile, splits
from loadtest.simulate.events import Events
from loadtest.simulate.harvested import HarvestedGpu
from worker.core.harvest import Split

#: Steps that a point is the mean of.
_STEPS = 40
_RUNNING, _EACH = (1, 4, 16, 32, 64), (128, 512, 1024, 2048)


def solo(pair: Pair, seed: int) -> dict[str, Any]:
    """Latency in ms, by batch and length, and what equation (2) says."""
    kind, fit = pair.kind, profile(pair, seed)
    whole, rows = next(s.step for s in fit.solo if s.share == kind.shares), []
    for running in _RUNNING:
        tokens = [running * each for each in _EACH]
        latencies = [kind.gpu.step_s(1.0, kind.decodes.bytes_(n), kind.decodes.flops(running, n)) for n in tokens]
        rows.append(
            {
                "running": running,
                "ms": [round(1000 * x, 2) for x in latencies],
                "error": max(abs(whole.seconds(running, n) / x - 1) for n, x in zip(tokens, latencies, strict=True)),
            }
        )
    return {"gpu": pair.gpu, "each": list(_EACH), "rows": rows}


def colocated(pair: Pair, seed: int) -> list[dict[str, Any]]:
    """Latency in ms of 16 sequences with 512 tokens each, by both shares: a line for each share of inference."""
    lines: dict[int, list[float]] = {}
    quiet = replace(pair.kind, noise=0.0)
    for split in splits(quiet.shares):
        gpu = HarvestedGpu(quiet, Events(), Held(split), pair.training(all_here=True), seed)
        seen = [gpu.compute(split, 16, 16 * 512)[0] for _ in range(_STEPS)]
        lines.setdefault(split.infer, []).append(round(1000 * sum(seen) / _STEPS, 2))
    alone = HarvestedGpu(quiet, Events(), Held(Split(1, 0)), None, seed)
    found = []
    for infer, line in lines.items():
        alone_s, _ = alone.compute(Split(infer, 0), 16, 16 * 512)
        found.append({"gpu": pair.gpu, "infer": infer, "alone_ms": round(1000 * alone_s, 2), "ms": line})
    return found


def slope_spread(gpu: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Growth of latency with a tenth more for training, in percent, where there is any: least, and most."""
    growth = [100 * (b / a - 1) for row in rows if row["gpu"] == gpu for a, b in pairwise(row["ms"]) if b > 1.002 * a]
    return {"gpu": gpu, "least": round(min(growth), 2), "most": round(max(growth), 2)}
