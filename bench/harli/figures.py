"""HARLI's figures, simulated: which runs each needs. A cell is one run, in a process of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.harli.arms import ARMS, errors_of, harvesting, run, serve
from bench.harli.curves import colocated, slope_spread, solo
from bench.harli.devices import GPUS, PAIRS, Pair
from bench.harli.loads import requests_of
from bench.harli.over_time import controlled
from bench.harli.profiling import Held
from loadtest.traces import TraceRequest
from worker.core.harvest import Split

#: Virtual seconds of the trace.
SECONDS, QUICK_S = 400.0, 15.0
#: Part of it over which predictions are judged.
_JUDGED = 4

#: A run, and what of it goes into the results.
Cell = Callable[[], dict[str, Any]]
#: Runs cells, some at a time, and returns their rows in order.
Pool = Callable[[Sequence[Cell]], list[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Bench:
    """quick: a short trace, one pair. seed: of the trace and of noise. trace: a file; None: generated."""

    quick: bool
    seed: int
    pool: Pool
    trace: Path | None = None

    def requests(self, part: int = 1) -> list[TraceRequest]:
        """Of both GPUs, over `1 / part` of the time."""
        return requests_of(self.trace, (QUICK_S if self.quick else SECONDS) / part, self.seed)

    @property
    def pairs(self) -> list[Pair]:
        """All, or one a GPU."""
        return [Pair(gpu, *pair) for gpu in GPUS for pair in (PAIRS[:1] if self.quick else PAIRS)]


def figure_8(bench: Bench) -> dict[str, Any]:
    """Decode latency by batch and length, all processors: how far from equation (2)."""
    return {"rows": bench.pool([functools.partial(solo, Pair(gpu, "Llama", "Llama"), bench.seed) for gpu in GPUS])}


def figure_9(bench: Bench) -> dict[str, Any]:
    """Decode latency by share of the processors."""
    rows = []
    for gpu in GPUS:
        pair = Pair(gpu, "Llama", "Llama")
        kind = replace(pair.kind, noise=0.0)
        for running, each in ((4, 256), (16, 1024), (64, 512)):
            work = kind.decodes
            bytes_, flops = work.bytes_(running * each), work.flops(running, running * each)
            latencies = [1000 * kind.gpu.step_s(share / 10, bytes_, flops) for share in range(1, 11)]
            rows.append({"gpu": gpu, "running": running, "each": each, "ms": [round(x, 2) for x in latencies]})
    return {"rows": rows}


def figure_10(bench: Bench) -> dict[str, Any]:
    """Decode latency beside training, by both shares."""
    pairs = [Pair(gpu, "Llama", "Llama") for gpu in GPUS]
    rows = [row for pair in pairs for row in colocated(pair, bench.seed)]
    return {"rows": rows, "slopes": [slope_spread(pair.gpu, rows) for pair in pairs]}


def figure_11(bench: Bench) -> dict[str, Any]:
    """TPOT and throughput of training: all pairs and systems."""
    requests = bench.requests()
    cells = [functools.partial(run, pair, arm, requests, bench.seed) for pair in bench.pairs for arm in ARMS]
    return {"rows": bench.pool(cells)}


def figure_12(bench: Bench) -> dict[str, Any]:
    """Prediction errors on steps of the trace: alone, and beside training."""
    requests = bench.requests(_JUDGED)
    cells = [functools.partial(_judged, pair, requests, bench.seed) for pair in bench.pairs]
    return {"rows": bench.pool(cells)}


def _judged(pair: Pair, requests: Sequence[TraceRequest], seed: int) -> dict[str, Any]:
    """Of one pair. paper: with equation (3) for all splits, also where it misfits."""
    harvest, fit = harvesting(pair, seed)
    alone = serve(pair, Held(Split(pair.kind.shares, 0)), None, requests, seed)
    beside = serve(pair, harvest, pair.training(), requests[::2], seed)
    steps = [s for s in beside.steps if s.steady and s.split.training]
    paper = replace(fit, pairs=tuple(replace(p, step=None) for p in fit.pairs))
    return {
        "gpu": pair.gpu,
        "serves": pair.serves,
        "trains": pair.trains,
        "alone": errors_of(fit, alone.steps),
        "beside": errors_of(fit, steps),
        "beside_equation_3": errors_of(paper, steps),
        "equation_3_sufficed": all(p.step is None for p in fit.pairs),
    }


def figure_13(bench: Bench) -> dict[str, Any]:
    """Memory and window (figure 13), shares and latency (14) while the batch is 8, 42 and 24."""
    pairs = [Pair(gpu, "Llama", "Llama") for gpu in GPUS]
    return {"rows": bench.pool([functools.partial(controlled, pair, bench.quick, bench.seed) for pair in pairs])}


def figure_tp(bench: Bench) -> dict[str, Any]:
    """Inference divided over both GPUs (section 8.7). To compare with figure 11."""
    requests = bench.requests()
    return {
        "rows": bench.pool([functools.partial(run, pair, "harli-tp", requests, bench.seed) for pair in bench.pairs])
    }


def figure_steep(bench: Bench) -> dict[str, Any]:
    """How much the gain depends on the part of the memory's rate that few SMs reach, an assumption."""
    requests, cells = bench.requests(_JUDGED), list[Cell]()
    for steep in (0.05, 0.1, 0.2, 0.4, 0.8):
        pair = Pair("Ada6000", "Llama", "Llama", steep=steep)
        about = {"steep": steep, "reached": [pair.shared.reached(part) for part in (0.1, 0.3)]}
        cells += [functools.partial(_with, about, pair, arm, requests, bench.seed) for arm in ARMS]
    return {"rows": bench.pool(cells)}


def _with(about: dict[str, Any], pair: Pair, arm: str, requests: Sequence[TraceRequest], seed: int) -> dict[str, Any]:
    return about | run(pair, arm, requests, seed)


FIGURES: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "8": figure_8,
    "9": figure_9,
    "10": figure_10,
    "11": figure_11,
    "12": figure_12,
    "13": figure_13,  # and 14
    "tp": figure_tp,
    "steep": figure_steep,
}
