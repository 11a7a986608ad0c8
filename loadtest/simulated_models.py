"""`upbeat simulate --models N`: a trace of several models on simulated devices that they share, by `sharing`; who kept
its objective."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from loadtest.attainment import attainment, by_model
from loadtest.client import Outcome
from loadtest.figures import Slo
from loadtest.simulate.many import Answered, ManyRun, ModelRequest, simulate_many
from loadtest.simulate.presets import H100, LLAMA_31_8B, LLAMA_32_1B, LLAMA_32_3B, QWEN_25_7B
from loadtest.simulate.shared_device import Sharing
from loadtest.simulate.shared_kind import SharedKind, shared_kind
from loadtest.traces import TraceRequest

SHARINGS: tuple[Sharing, ...] = ("static", "elastic", "swap", "prism")
#: What the models are, in turn.
SHAPES = (LLAMA_31_8B, LLAMA_32_3B, LLAMA_32_1B, QWEN_25_7B)
#: HTTP and tokenising, in seconds.
_REQUEST_S = 0.03
#: Longest request, in tokens. Prompts are cut to it.
_MOST_TOKENS = 16_384
#: Part of a device that weights may take where all stay.
_WEIGHTS_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class ModelTrace:
    """Requests for simulated models, and their names there by their names in the trace."""

    kind: SharedKind
    requests: list[ModelRequest]
    names: dict[str, str]

    @classmethod
    def of(
        cls, trace: Sequence[TraceRequest], models: Sequence[str], *, time_scale: float = 1.0, length_scale: float = 1.0
    ) -> ModelTrace:
        """`models`: all names of the trace's models. Raises ValueError if a request names another one."""
        if unknown := sorted({r.model for r in trace} - set(models)):
            raise ValueError(f"the trace has requests for {', '.join(unknown)}, which is not among its models")
        kind = shared_kind(H100, list(islice(cycle(SHAPES), len(models))), request_s=_REQUEST_S)
        names = {name: model.name for name, model in zip(models, kind.models, strict=True)}
        requests = []
        for r in trace:
            answer = min(max(round(r.output_tokens * length_scale), 1), _MOST_TOKENS // 2)
            prompt = min(max(round(r.input_tokens * length_scale), 1), _MOST_TOKENS - answer)
            requests.append(ModelRequest(r.arrival_s * time_scale, names[r.model], prompt, answer))
        return cls(kind, requests, names)

    def where(self, devices: int) -> list[list[str]]:
        """A device for each model, for weights that stay: the busiest model first, to the device with the least to do
        that has room. Raises ValueError where they do not fit."""
        tokens = {model.name: 0 for model in self.kind.models}
        for r in self.requests:
            tokens[r.model] += r.input_tokens + r.output_tokens
        left, busy = [_WEIGHTS_SHARE * self.kind.granules] * devices, [0] * devices
        found: list[list[str]] = [[] for _ in range(devices)]
        for model in sorted(self.kind.models, key=lambda m: (-tokens[m.name], -m.granules, m.name)):
            able = [d for d in range(devices) if left[d] >= model.granules]
            if not able:
                raise ValueError(
                    f"weights of {len(self.names)} models do not fit on {devices} devices; give more --nodes, fewer "
                    "--models, or `--sharing prism`"
                )
            best = min(able, key=lambda d: (busy[d], d))
            found[best].append(model.name)
            left[best] -= model.granules
            busy[best] += tokens[model.name]
        return found


def simulated(trace: ModelTrace, devices: int, sharing: Sharing, slo: Slo) -> dict[str, Any]:
    """Figures of one run: `models` by their names in the trace, and `attainment` over all. Raises ValueError where the
    models, or a request, do not fit."""
    began = time.perf_counter()
    where = trace.where(devices) if sharing in ("static", "elastic") else None
    outcome = simulate_many(ManyRun(trace.kind, devices, sharing, where), trace.requests)
    called = {simulated: name for name, simulated in trace.names.items()}
    outcomes = [_outcome(number, answer, called[answer.asked.model]) for number, answer in enumerate(outcome.answers)]
    slos = dict.fromkeys(trace.names, slo)
    return {
        "requests": len(outcomes),
        "failed": sum(o.error is not None for o in outcomes),
        "attainment": attainment(outcomes, slos),
        "models": by_model(outcomes, slos),
        "totals": {name: round(value, 3) for name, value in outcome.totals.items()},
        "real_s": round(time.perf_counter() - began, 2),
    }


def _outcome(number: int, answer: Answered, model: str) -> Outcome:
    asked = answer.asked
    return Outcome(
        f"r{number}",
        0,
        asked.time_s,
        asked.time_s,
        answer.first_s,
        end_s=answer.end_s,
        prompt_tokens=asked.input_tokens,
        output_tokens=asked.output_tokens,
        node=answer.device,
        error=None if answer.end_s >= 0 else "it did not end in time",
        model=model,
    )


def parse_sharings(text: str) -> list[Sharing]:
    """From a comma-separated list. Raises ValueError naming the unknown one and those that exist."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ValueError(f"--sharing is empty; there are {', '.join(SHARINGS)}")
    found = {name: name for name in SHARINGS}
    for name in names:
        if name not in found:
            raise ValueError(f"--sharing {name}: there are {', '.join(SHARINGS)}")
    return [sharing for sharing in SHARINGS if sharing in names]


def overall(found: Mapping[str, Mapping[str, Any]]) -> str:
    """The attainment under each `sharing`, in a line."""

    def percent(share: float | None) -> str:
        return "-" if share is None else f"{100 * share:.1f} %"

    return "; ".join(
        f"{name}: TTFT {percent(each['attainment']['ttft'])}, TPOT {percent(each['attainment']['tpot'])}"
        for name, each in found.items()
    )
