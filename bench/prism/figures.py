"""Prism's figures, simulated: which runs each needs. A cell is one run, in a process of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bench.prism.arms import ARMS, Target, alone, run
from bench.prism.loads import API, CHAT, Kind, described, trace
from loadtest.simulate.costs import ModelShape
from loadtest.simulate.many import ManyRun, ModelRequest, simulate_many
from loadtest.simulate.presets import (
    A100_40,
    H100,
    LLAMA_31_8B,
    LLAMA_32_1B,
    LLAMA_32_3B,
    QWEN_25_7B,
    QWEN_25_14B,
    QWEN_25_32B,
)
from loadtest.simulate.shared_kind import SharedKind, shared_kind

#: HTTP, tokenising and streaming, so that TTFT alone is within the paper's 0.04 to 0.13 s (ours).
REQUEST_S = 0.03
#: The paper does not say which eight models figure 5 has. Ours, the most popular first.
EIGHT = (LLAMA_31_8B, QWEN_25_14B, LLAMA_32_3B, QWEN_25_7B, LLAMA_31_8B, LLAMA_32_1B, QWEN_25_7B, LLAMA_32_3B)
#: 18 models of 1 to 8B.
EIGHTEEN = (LLAMA_31_8B, LLAMA_32_3B, LLAMA_32_1B, QWEN_25_7B, LLAMA_32_3B, LLAMA_32_1B) * 3
#: Table 3 without its four models of 31 to 70B, which need several devices each: 43 of 1 to 3B, 8 of 4 to 8B, 3 of 14B.
FIFTY_FOUR = (
    *(LLAMA_31_8B, *(LLAMA_32_3B, LLAMA_32_1B) * 3) * 4,
    *(QWEN_25_7B, *(LLAMA_32_3B, LLAMA_32_1B) * 2) * 4,
    *(QWEN_25_14B, LLAMA_32_1B) * 3,
)
#: Requests a second of figure 5; the second one is the workload that targets are measured with.
RATES = {"chat": (8.0, 16.0, 24.0), "api": (4.0, 8.0)}
KINDS = {kind.name: kind for kind in (CHAT, API)}

#: A run, and what of it goes into the results.
Cell = Callable[[], dict[str, Any]]
#: Runs cells, some at a time, and returns their rows in order.
Pool = Callable[[Sequence[Cell]], list[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Bench:
    """quick: shorter traces, fewer rates. seed: of the traces. arms: names of those to run."""

    quick: bool
    seed: int
    pool: Pool
    arms: Sequence[str] = tuple(ARMS)

    @property
    def seconds(self) -> float:
        """Length of a trace."""
        return 60.0 if self.quick else 120.0

    def trace(self, kind: SharedKind, load: Kind, rate: float) -> list[ModelRequest]:
        """Requests for these models."""
        return trace([model.name for model in kind.models], load, rate, self.seconds, self.seed)


def _kind(shapes: Sequence[ModelShape]) -> SharedKind:
    return shared_kind(H100, shapes, request_s=REQUEST_S)


def _cell(
    shapes: Sequence[ModelShape],
    devices: int,
    arm: str,
    requests: list[ModelRequest],
    targets: dict[str, Target],
    **about: Any,
) -> dict[str, Any]:
    return about | run(_kind(shapes), devices, arm, requests, targets)


def _targets(shapes: Sequence[ModelShape], requests: list[ModelRequest]) -> dict[str, Any]:
    return {name: asdict(target) for name, target in alone(_kind(shapes), requests).items()}


def _measured(bench: Bench, shapes: Sequence[ModelShape], rates: dict[str, float]) -> dict[str, dict[str, Target]]:
    """Targets by kind of requests, at these rates."""
    kind = _kind(shapes)
    found = bench.pool(
        [functools.partial(_targets, shapes, bench.trace(kind, KINDS[name], rate)) for name, rate in rates.items()]
    )
    return {name: {model: Target(**of) for model, of in each.items()} for name, each in zip(rates, found, strict=True)}


def _about(bench: Bench, shapes: Sequence[ModelShape], rates: dict[str, float]) -> dict[str, Any]:
    kind = _kind(shapes)
    names = [model.name for model in kind.models]
    return {
        "models": names,
        "weights_share_of_one_device": round(sum(model.granules for model in kind.models) / kind.granules, 3),
        "seconds": bench.seconds,
        "traces": {
            name: {"requests_per_s": rate} | described(bench.trace(kind, KINDS[name], rate), names, bench.seconds)
            for name, rate in rates.items()
        },
    }


def figure_5(bench: Bench) -> dict[str, Any]:
    """Attainment of 8 models on 2 devices, against the request rate (row 1) and the target's scale (row 2)."""
    rates = {name: each[1:2] if bench.quick else each for name, each in RATES.items()}
    base = {name: each[1] for name, each in RATES.items()}
    targets = _measured(bench, EIGHT, base)
    cells = [
        functools.partial(
            _cell, EIGHT, 2, arm, bench.trace(_kind(EIGHT), KINDS[name], rate), targets[name], load=name, rate=rate
        )
        for name, each in rates.items()
        for rate in each
        for arm in bench.arms
    ]
    told = {name: {model: asdict(of) for model, of in each.items()} for name, each in targets.items()}
    return _about(bench, EIGHT, base) | {"targets": told, "rows": bench.pool(cells)}


def figure_5_devices(bench: Bench) -> dict[str, Any]:
    """Attainment of 18 models against the number of devices (row 3)."""
    return _against_devices(bench, EIGHTEEN, {"chat": 10.0}, (2, 3) if bench.quick else (2, 3, 4, 6))


def figure_9(bench: Bench) -> dict[str, Any]:
    """Attainment of 54 models against the number of devices."""
    return _against_devices(bench, FIFTY_FOUR, {"chat": 20.0}, (6,) if bench.quick else (6, 8, 12))


def _against_devices(
    bench: Bench, shapes: Sequence[ModelShape], rates: dict[str, float], devices: Sequence[int]
) -> dict[str, Any]:
    targets, kind = _measured(bench, shapes, rates), _kind(shapes)
    cells = [
        functools.partial(_cell, shapes, count, arm, bench.trace(kind, KINDS[name], rate), targets[name], load=name)
        for name, rate in rates.items()
        for count in devices
        for arm in bench.arms
    ]
    return _about(bench, shapes, rates) | {"rows": bench.pool(cells)}


def figure_10(bench: Bench) -> dict[str, Any]:
    """Time until a model's weights are here, and to the first token of a 512-token prompt, by size."""
    shapes = (LLAMA_32_1B, LLAMA_32_3B, QWEN_25_7B, LLAMA_31_8B, QWEN_25_14B, QWEN_25_32B)
    return {"prompt_tokens": 512, "rows": bench.pool([functools.partial(_activated, shape) for shape in shapes])}


def _activated(shape: ModelShape) -> dict[str, Any]:
    """The model is cold, then active; the other one has no requests."""
    kind = shared_kind(H100, [shape, LLAMA_32_1B if shape is not LLAMA_32_1B else LLAMA_32_3B])
    model = kind.models[0].name
    cold, active = ModelRequest(1.0, model, 512, 2), ModelRequest(30.0, model, 512, 2)
    outcome = simulate_many(ManyRun(kind, 1, "swap"), [cold, active])
    residency = outcome.fleet.devices["device-0"].residency
    assert residency is not None
    resident = residency.models[model]
    assert resident.activations == 1
    return {
        "model": model,
        "weight_bytes": kind.models[0].weight_bytes,
        "weights_s": round(kind.activation_s(kind.models[0]), 4),
        "first_token_cold_s": round(outcome.answers[0].ttft_s, 4),
        "first_token_active_s": round(outcome.answers[1].ttft_s, 4),
    }


def figure_14(bench: Bench) -> dict[str, Any]:
    """The worst case: two equal models at constant load on an A100-40G, elastic against static."""
    rates, seconds = (28.0, 32.0), 20.0 if bench.quick else 40.0
    cells = [
        functools.partial(_constant, rate, arm, seconds, bench.seed) for rate in rates for arm in ("static", "elastic")
    ]
    return {"seconds": seconds, "rows": bench.pool(cells)}


def _constant(rate: float, arm: str, seconds: float, seed: int) -> dict[str, Any]:
    kind = shared_kind(A100_40, [LLAMA_32_3B, LLAMA_32_3B], request_s=REQUEST_S)
    lengths = trace(["any"], CHAT, rate * 2, seconds, seed)
    count = min(int(rate * seconds), len(lengths))
    asked = [
        ModelRequest(n / rate, kind.models[n % 2].name, lengths[n].input_tokens, lengths[n].output_tokens)
        for n in range(count)
    ]
    answers = simulate_many(ManyRun(kind, 1, "static" if arm == "static" else "elastic"), asked).answers
    return {
        "arm": arm,
        "rate": rate,
        "requests": len(asked),
        "ttft_mean_s": round(float(np.mean([a.ttft_s for a in answers])), 5),
        "tpot_mean_s": round(float(np.mean([a.tpot_s for a in answers])), 6),
    }


FIGURES: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "5": figure_5,
    "5-devices": figure_5_devices,
    "9": figure_9,
    "10": figure_10,
    "14": figure_14,
}
