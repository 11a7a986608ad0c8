"""The systems that are compared (section 8.1), and what a run gives.

- `separate`: one GPU decodes all requests, the other one trains.
- `static`: both decode half of the requests, on 60 % of processors and memory, and train on the rest.
- `harli`: production's predictor, choice of splits and window, with the paper's trainer (2 examples a layer) and its
  rule: the split whose latency is closest below the target.
- `harvest`: ours: 8 examples a layer, and the split in which training was measured to be quickest.
- `harli-tp`: as `harli`, with inference divided over both GPUs, so that each has half of its weights (section 8.7).

Two GPUs with half of the requests each are alike: one of them is simulated, and what it trains counts twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from bench.harli.devices import GRANULE_BYTES, Pair
from bench.harli.profiling import Held, profile
from contracts.corun import CorunFit
from contracts.ids import DEFAULT_TENANT, SessionKey
from loadtest.simulate.events import Events
from loadtest.simulate.harvested import HarvestedGpu, Splitting, StepSeen
from loadtest.simulate.request import Request
from loadtest.simulate.token_gaps import percentiles
from loadtest.simulate.training import Training
from loadtest.traces import TraceRequest
from worker.core.fit_steps import Measurement, predicted_s
from worker.core.harvest import Harvest, Split
from worker.core.predictor import Predictor

ARMS = ("separate", "static", "harli", "harvest")
#: Of processors and memory, inference's in `static`.
STATIC = 0.6
#: Virtual seconds over which training alone is measured, without inference.
_ALONE_S = 60.0


@dataclass(slots=True)
class Ran:
    """A run: its GPU, its steps and how long it was."""

    gpu: HarvestedGpu
    seconds: float
    steps: list[StepSeen] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)


def serve(
    pair: Pair,
    splitting: Splitting,
    training: Training | None,
    requests: Sequence[TraceRequest],
    seed: int,
    until_s: float | None = None,
) -> Ran:
    """Decode these requests. until_s: virtual seconds, with requests that then still run; None: until the last ends."""
    events, steps = Events(), list[StepSeen]()
    kind = pair.serving if training is None else pair.kind
    gpu = HarvestedGpu(kind, events, splitting, training, seed, steps.append)
    made = []
    for number, asked in enumerate(requests):
        name = f"r{number}"
        request = Request(
            name,
            SessionKey(DEFAULT_TENANT, name),
            0,
            asked.input_tokens,
            0,
            asked.output_tokens,
            asked.arrival_s,
            lambda request: None,
        )
        made.append(request)
        events.at(asked.arrival_s, lambda request=request: gpu.submit(request))  # type: ignore[misc]
    if until_s is not None:
        events.run(lambda: False, limit_s=until_s)
        events.now = max(events.now, until_s)
    else:
        events.run(lambda: gpu.answered == len(made))
    gpu.idle_until(events.now)
    return Ran(gpu, events.now, steps, made)


def trained_alone(pair: Pair, seed: int) -> float:
    """Tokens a second of training with a GPU of its own, and all layers in its memory."""
    training = pair.training(all_here=True)
    whole = Held(Split(0, pair.kind.shares))
    gpu = HarvestedGpu(pair.kind, Events(), whole, training, seed)
    gpu.idle_until(_ALONE_S)
    return training.tokens / _ALONE_S


def run(pair: Pair, arm: str, requests: Sequence[TraceRequest], seed: int) -> dict[str, Any]:
    """A run's figures. requests: of both GPUs."""
    row: dict[str, Any] = {"gpu": pair.gpu, "serves": pair.serves, "trains": pair.trains, "arm": arm}
    if arm == "separate":
        ran = serve(pair, Held(Split(pair.kind.shares, 0)), None, requests, seed)
        return row | _figures(ran) | {"trained_tokens_s": round(trained_alone(pair, seed), 1), "window_mean": None}
    if arm == "static":
        divided = replace(pair, part=STATIC)
        training = divided.training()
        # Its memory is its own, whatever KV needs.
        fits = Held(Split(round(STATIC * pair.kind.shares), pair.kind.shares - round(STATIC * pair.kind.shares)))
        training.resize(int(divided.static_layers_bytes // GRANULE_BYTES), 0)
        ran = serve(divided, fits, Fenced(training), requests[::2], seed)
        return row | _figures(ran) | _trained(ran)
    made = pair if arm == "harli" else replace(pair, devices=2) if arm == "harli-tp" else replace(pair, examples=8)
    harvest, fit = harvesting(made, seed, rates=arm == "harvest")
    # Both GPUs of `harli-tp` have a part in each step of all requests.
    mine = requests if arm == "harli-tp" else requests[::2]
    ran = serve(made, harvest, made.training(), mine, seed)
    return row | _figures(ran) | _trained(ran) | _decided(harvest, ran, fit)


class Fenced(Training):
    """A trainer whose memory is its own."""

    def __init__(self, made: Training) -> None:
        super().__init__(made.work, made.window, made.copy_s)

    def resize(self, free: int, needed: int) -> None:
        """KV is elsewhere."""


def harvesting(pair: Pair, seed: int, rates: bool = False) -> tuple[Harvest, CorunFit]:
    """Production's choice of splits for a device, with the profile of it."""
    fit = profile(pair, seed, rates)
    return Harvest(Predictor(fit)), fit


def _figures(ran: Ran) -> dict[str, Any]:
    """What inference gets."""
    target_s, gaps = ran.gpu.kind.target_s, ran.gpu.gaps
    p50, p90, p99 = percentiles([gaps], (50, 90, 99))
    seconds, counts = np.array(gaps.seconds), np.array(gaps.counts)
    return {
        "requests": len(ran.requests),
        "seconds": round(ran.seconds, 1),
        "steps": len(ran.steps),
        "running_mean": round(sum(s.running * s.seconds for s in ran.steps) / sum(s.seconds for s in ran.steps), 1),
        "running_most": max(s.running for s in ran.steps),
        "tpot_p50_ms": round(1000 * p50, 2),
        "tpot_p90_ms": round(1000 * p90, 2),
        "tpot_p99_ms": round(1000 * p99, 2),
        "in_time": round(float(counts[seconds <= target_s].sum() / counts.sum()), 5),
        "preemptions": ran.gpu.core.scheduling.preemptions,
        "cdf": [round(1000 * x, 2) for x in percentiles([gaps], range(5, 100, 10))],
    }


def _trained(ran: Ran) -> dict[str, Any]:
    """What training gets, on both GPUs."""
    training = ran.gpu.training
    assert training is not None
    return {
        "trained_tokens_s": round(2 * training.tokens / ran.seconds, 1),
        "window_mean": round(sum(s.window * s.seconds for s in ran.steps) / sum(s.seconds for s in ran.steps), 1),
        "copies_s": round(training.copies / ran.seconds, 2),
    }


def _decided(harvest: Harvest, ran: Ran, fit: CorunFit) -> dict[str, Any]:
    """What the choice of splits did, and the errors of its predictions, without what it learned later."""
    counts, shares, seconds = harvest.counts, ran.gpu.kind.shares, ran.seconds
    harvest.validate()
    return {
        "trained_part": round((counts.unit_s + counts.idle_unit_s) / (shares * seconds), 3),
        "paused_part": round(counts.paused_s / seconds, 3),
        "starved_part": round(counts.starved_s / seconds, 3),
        "changes_s": round(counts.changes / seconds, 2),
        "late_beside": counts.late_beside,
        "steps_beside": counts.steps_beside,
        "backoffs": counts.backoffs,
        "margin": round(harvest.predictor.margin, 4),
        "errors": errors_of(fit, [s for s in ran.steps if s.steady and s.split.training]),
    }


def errors_of(fit: CorunFit, steps: Sequence[StepSeen]) -> dict[str, float] | None:
    """Relative errors of the fits on these steps; None: there is none."""
    if not steps:
        return None
    each = [abs(predicted_s(fit, Measurement(*s.split, s.running, s.tokens, s.seconds)) / s.seconds - 1) for s in steps]
    p95, most = np.percentile(each, (95, 100))
    return {"steps": len(each), "mean": float(np.mean(each)), "p95": float(p95), "worst": float(most)}
