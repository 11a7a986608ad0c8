"""Replays a trace of several models on a running stack: who gets which of its models, and how each keeps its
objective."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from contracts.errors import ConfigError
from loadtest.attainment import attainment, by_model
from loadtest.client import Endpoint, Outcome
from loadtest.figures import Slo, figures
from loadtest.many_models import generate
from loadtest.model_statistics import ModelStatistics, statistics
from loadtest.plans import PlannedSession, turns_of
from loadtest.policies import fixed_answers, raw
from loadtest.report import provenance
from loadtest.sessions import find_sessions, first_requests
from loadtest.stack import StackError
from loadtest.traces import TraceError, TraceRequest, read_trace
from loadtest.users import run_load
from loadtest.workload import fitting_scale, plan
from runtime.clock import RealClock

#: Generated traces are drawn for this many seconds at first.
_DRAWN_S = 600.0
#: Share of a model's context to use, as lengths are estimates.
_CONTEXT_MARGIN = 0.98
#: Number of windows in a run, for imbalance.
_WINDOWS = 20


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model of the stack. max_tokens: longest prompt plus output; 0: unknown. slo: its own objective."""

    name: str
    max_tokens: int
    slo: Slo


def served_models(url: str, key: str | None) -> list[ServedModel]:
    """The models at `url`, as `GET /v1/models` lists them. Raises StackError."""
    try:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        request = urllib.request.Request(f"{url.rstrip('/')}/v1/models", headers=headers)
        with urllib.request.urlopen(request, timeout=10) as answer:
            listed = json.load(answer)["data"]
        return [
            ServedModel(
                str(m["id"]),
                int(m.get("max_model_len") or 0),
                Slo(float(m.get("ttft_slo_s") or 0) or None, float(m.get("tpot_slo_s") or 0) or None),
            )
            for m in listed
        ]
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, AttributeError) as e:
        raise StackError(f"{url}/v1/models lists no models ({type(e).__name__}: {e}); is a stack served there?") from e


def generated(models: int, count: int, seed: int, like: str) -> list[TraceRequest]:
    """The first `count` requests of a generated trace of `models` models. Raises ValueError."""
    seconds = _DRAWN_S
    while len(found := generate(models, seconds, seed, like)) < count:
        seconds *= 2
    return found[:count]


def read_models(trace: Path) -> list[TraceRequest]:
    """The requests of a trace that names models. Raises TraceError, and OSError."""
    found = read_trace(trace)
    if not all(r.model for r in found):
        raise TraceError(f"{trace} names no model for some requests; give a BurstGPT trace with its column Model")
    return found


def named(requests: Sequence[TraceRequest], served: Sequence[str]) -> dict[str, str]:
    """The stack's model for each model of the trace: the one of the same name if all have one; else the busiest gets
    the first served, and so on. Raises ValueError if there are too few."""
    count = Counter(r.model for r in requests)
    if set(count) <= set(served):
        return {name: name for name in count}
    if len(count) > len(served):
        raise ValueError(
            f"the trace has {len(count)} models and the stack serves {len(served)} ({', '.join(served)}); "
            "give --models with at most that, or serve more (`upbeat up --model NAME=DIR`, repeated)"
        )
    return dict(zip(sorted(count, key=lambda name: (-count[name], name)), served, strict=False))


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """A load that is ready to be sent. names: of the stack's models, by the trace's. slos: by the stack's."""

    sessions: list[PlannedSession]
    endpoint: Endpoint
    names: dict[str, str]
    slos: dict[str, Slo]
    length_scale: float
    statistics: ModelStatistics

    def send(self) -> tuple[list[Outcome], bool]:
        """Send it; returns the outcomes by sending time, and whether Ctrl-C ended it. KeyboardInterrupt if there are
        none."""
        kept: list[Outcome] = []
        interrupted = False
        try:
            asyncio.run(run_load(self.endpoint, self.sessions, RealClock(), kept.append))
        except KeyboardInterrupt:
            if not kept:
                raise
            interrupted = True
        return sorted(kept, key=lambda o: o.sent_s), interrupted


def prepare(
    requests: Sequence[TraceRequest],
    *,
    url: str,
    count: int,
    seed: int = 1,
    time_scale: float = 1.0,
    min_turns: int = 1,
    length_scale: float | None = None,
    max_tokens: int | None = None,
    hints: bool = False,
    ttft_s: float | None = None,
    tpot_s: float | None = None,
    model: Path | None = None,
    key_env: str = "",
    models: int | None = None,
) -> ModelLoad:
    """The first `count` requests for the stack at `url`.

    ttft_s, tpot_s: replace the models' own objectives. model: directory of one of them, for answers of fixed words.
    key_env: environment variable of the API key. models: number of the trace's models, if some have no request. Raises
    StackError, ConfigError, ValueError.
    """
    if key_env and key_env not in os.environ:
        raise ConfigError(f"--key-env {key_env!r}: the environment has no such variable; set it, or leave the flag out")
    key = os.environ[key_env] if key_env else None
    served = {each.name: each for each in served_models(url, key)}
    sessions = first_requests(find_sessions(requests), count, min_turns)
    if not sessions:
        raise ValueError(f"the trace has no session of at least {min_turns} turns; lower --min-turns")
    sent = [turn for session in sessions for turn in session.turns]
    names = named(sent, list(served))
    used = {name: served[name] for name in names.values()}
    longest = min((each.max_tokens for each in used.values() if each.max_tokens), default=0)
    if length_scale is None:
        length_scale = fitting_scale(sessions, int(longest * _CONTEXT_MARGIN), max_tokens) if longest else 1.0
    planned = plan(sessions, length_scale=length_scale, time_scale=time_scale, seed=seed, max_answer_tokens=max_tokens)
    endpoint = Endpoint(
        url.rstrip("/"),
        model=next(iter(used)),
        api_key=key,
        hints=hints,
        body={"ignore_eos": True} if model is None else fixed_answers(model),
    )
    return ModelLoad(
        sessions=[replace(s, model=names[s.model]) for s in planned],
        endpoint=replace(endpoint, models={name: name for name in used}),
        names=names,
        slos={name: _slo(each.slo, ttft_s, tpot_s) for name, each in used.items()},
        length_scale=length_scale,
        statistics=statistics(sent, models=models),
    )


def replayed(load: ModelLoad, trace: str, console: Console) -> dict[str, Any]:
    """Send a load and print its table. Returns its figures, with `attainment` over all models, `models` one by one, and
    `outcomes`. trace: its name."""
    count = turns_of(load.sessions)
    console.print(
        f"{count} requests of {len(load.names)} models from {trace}; lengths × {load.length_scale:g}", soft_wrap=True
    )
    console.print(described(load.statistics), soft_wrap=True)
    outcomes, interrupted = load.send()
    span_s = max(o.end_s for o in outcomes) - min(o.sent_s for o in outcomes)
    nodes = len({o.node for o in outcomes if o.node is not None})
    found = figures(outcomes, max(nodes, 1), span_s / _WINDOWS)
    for error in found["errors"]:
        console.print(f"[red]{error}[/red]", soft_wrap=True)
    models = by_model(outcomes, load.slos)
    console.print(table_of(models, attainment(outcomes, load.slos)))
    return (
        provenance()
        | {"trace": trace, "names": load.names, "length_scale": load.length_scale}
        | {"statistics": asdict(load.statistics), "interrupted": interrupted}
        | found
        | {"attainment": attainment(outcomes, load.slos), "models": models, "outcomes": [raw(o) for o in outcomes]}
    )


def table_of(models: Mapping[str, Mapping[str, Any]], overall: Mapping[str, float | None]) -> Table:
    """A row a model, and one for all."""
    head = ("model", "requests", "failed", "TTFT p50", "p95 (s)", "objective", "kept (%)")
    table = Table(*head, "TPOT p50", "p95 (ms)", "objective", "kept (%)", title="by model", title_justify="left")
    for name, of in models.items():
        cells = [name, str(of["requests"]), str(of["failed"])]
        for what, factor, digits in (("ttft", 1, 3), ("tpot", 1000, 1)):
            values = (of[f"{what}_s"].get("p50"), of[f"{what}_s"].get("p95"), of["slo"][f"{what}_s"])
            cells += ["-" if value is None else f"{factor * value:.{digits}f}" for value in values]
            cells.append(_percent(of["attainment"][what]))
        table.add_row(*cells)
    requests, failed = (str(sum(of[what] for of in models.values())) for what in ("requests", "failed"))
    table.add_row("all", requests, failed, "", "", "", _percent(overall["ttft"]), "", "", "", _percent(overall["tpot"]))
    return table


def described(found: ModelStatistics) -> str:
    """The statistics of a trace, in a line."""
    return (
        f"{found.active_share:.0%} of {found.models} models active at a time, {found.switches_per_hour:.0f} changes of "
        f"the active set an hour, idle {found.idle_share:.0%} of the time, {_mean(found.idle_per_hour):.0f} idle "
        f"intervals an hour, CV of requests a minute {_mean(found.variation):.1f}"
    )


def _slo(own: Slo, ttft_s: float | None, tpot_s: float | None) -> Slo:
    return Slo(own.ttft_s if ttft_s is None else ttft_s, own.tpot_s if tpot_s is None else tpot_s)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"
