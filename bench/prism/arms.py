"""The systems that are compared, their service targets, and what a run gives.

S-Partition, MuxServe++, QLM and ServerlessLLM are the product's `sharing: static`, `elastic`, `swap` and `serverless`.
With fixed weights each model has one device, by mean demand; else all models are registered on all devices.
`prism-placed` is `prism` with each model registered on one device, as `elastic` has them: what placement would at least
give.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from loadtest.simulate.many import Answered, ManyRun, ModelRequest, simulate_many
from loadtest.simulate.shared_device import Sharing
from loadtest.simulate.shared_kind import SharedKind


class Arm(NamedTuple):
    """A system. fixed: each model has one device."""

    sharing: Sharing
    fixed: bool


ARMS = {
    "static": Arm("static", True),
    "elastic": Arm("elastic", True),
    "swap": Arm("swap", False),
    "serverless": Arm("serverless", False),
    "prism": Arm("prism", False),
    "prism-placed": Arm("prism", True),
}
#: Multiples of P95 alone.
TTFT_SCALES, TPOT_SCALES = (1, 2, 3, 5, 8, 13, 20, 30), (1, 1.5, 2, 3, 4, 6, 8, 12)
#: Part of a device's memory that weights may take where models have one device.
_WEIGHTS_SHARE = 0.9
#: A model without requests is measured with so many, so far apart.
_LONE, _LONE_EVERY_S = 20, 2.0


@dataclass(frozen=True, slots=True)
class Target:
    """P95 of a model alone on a device, and the seconds of the device that its requests take."""

    ttft_s: float
    tpot_s: float
    busy_s: float


def alone(kind: SharedKind, requests: Sequence[ModelRequest]) -> dict[str, Target]:
    """Each model's workload on a device of its own (section 7.1, "Metrics")."""
    found = {}
    for model in kind.models:
        own = [asked for asked in requests if asked.model == model.name]
        lone = [
            ModelRequest(_LONE_EVERY_S * n, model.name, asked.input_tokens, asked.output_tokens)
            for n, asked in enumerate(requests[:_LONE])
        ]
        outcome = simulate_many(ManyRun(kind.of([model.name]), 1, "static"), own or lone)
        ttft, tpot = ([getattr(a, name) for a in outcome.answers] for name in ("ttft_s", "tpot_s"))
        busy_s = outcome.totals["busy_s"] if own else 0.0
        found[model.name] = Target(float(np.percentile(ttft, 95)), float(np.percentile(tpot, 95)), busy_s)
    return found


def spread(
    kind: SharedKind, targets: Mapping[str, Target], devices: int, *, together: bool = True
) -> list[list[str]] | None:
    """Models by device: the one that takes most time first, to the device that has least to do and room for it. None:
    weights do not fit. together: all weights of a device are there at once."""
    models = {model.name: model for model in kind.models}
    where: list[list[str]] = [[] for _ in range(devices)]
    busy, used = [0.0] * devices, [0] * devices
    for name in sorted(models, key=lambda n: (-targets[n].busy_s, -models[n].granules, n)):
        most = _WEIGHTS_SHARE * kind.granules if together else float("inf")
        able = [d for d in range(devices) if used[d] + models[name].granules <= most]
        if not able:
            return None
        best = min(able, key=lambda d: (busy[d], used[d]))
        where[best].append(name)
        busy[best] += targets[name].busy_s
        used[best] += models[name].granules
    return where


def attainment(answers: Sequence[Answered], targets: Mapping[str, Target]) -> dict[str, dict[str, float]]:
    """Shares of requests that keep to their model's target, by its scale. Requests without an end do not."""
    ttft = [a.ttft_s / targets[a.asked.model].ttft_s for a in answers]
    tpot = [a.tpot_s / targets[a.asked.model].tpot_s for a in answers]
    return {
        name: {f"{scale:g}": round(float(np.mean(np.array(of) <= scale)), 4) for scale in scales}
        for name, of, scales in (("ttft", ttft, TTFT_SCALES), ("tpot", tpot, TPOT_SCALES))
    }


def run(
    kind: SharedKind, devices: int, arm: str, requests: Sequence[ModelRequest], targets: Mapping[str, Target]
) -> dict[str, Any]:
    """One run's figures. `held`: False where the arm cannot hold the models, or their longest request."""
    row: dict[str, Any] = {"arm": arm, "devices": devices, "requests": len(requests), "held": False}
    together = ARMS[arm].sharing in ("static", "elastic")
    where = spread(kind, targets, devices, together=together) if ARMS[arm].fixed else None
    if ARMS[arm].fixed and where is None:
        return row
    try:
        outcome = simulate_many(ManyRun(kind, devices, ARMS[arm].sharing, where), requests)
    except ValueError as error:
        return row | {"why": str(error)}
    ended = [a for a in outcome.answers if a.end_s >= 0]
    return row | {
        "held": True,
        "unfinished": len(requests) - len(ended),
        "attainment": attainment(outcome.answers, targets),
        "ttft_p50_s": _percentile([a.ttft_s for a in ended], 50),
        "ttft_p95_s": _percentile([a.ttft_s for a in ended], 95),
        "tpot_p50_s": _percentile([a.tpot_s for a in ended], 50),
        "tpot_p95_s": _percentile([a.tpot_s for a in ended], 95),
        **{name: round(value, 1) for name, value in outcome.totals.items()},
    }


def _percentile(values: Sequence[float], of: float) -> float | None:
    return round(float(np.percentile(values, of)), 4) if values else None
