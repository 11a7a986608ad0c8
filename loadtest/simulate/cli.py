"""`upbeat simulate`: simulates a fleet under several policies and prints their figures side by side; or, with
`--models` or `--sharing`, devices that several models share."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from contracts.errors import ConfigError
from contracts.ids import DEFAULT_TENANT
from loadtest.figures import Slo
from loadtest.habits import Habits
from loadtest.many_models import PROFILES, generate
from loadtest.model_replay import described, read_models, table_of
from loadtest.model_statistics import statistics
from loadtest.report import provenance, write_json
from loadtest.simulate.fleet import VARIANTS, Variant
from loadtest.simulate.presets import PRESETS, node_kind
from loadtest.simulate.scenario import Run, scripts, simulate, trace_sessions
from loadtest.simulate.turns import coarsened, most_tokens
from loadtest.simulated_models import SHARINGS, ModelTrace, overall, parse_sharings, simulated
from loadtest.tables import PolicyTables
from loadtest.traces import TraceError

#: Columns: heading, path into the figures, factor, digits.
_FIGURES: tuple[tuple[str, tuple[str, ...], float, int], ...] = (
    ("requests", ("requests",), 1, 0),
    ("requests/s", ("requests_per_s",), 1, 2),
    ("TTFT: mean (s)", ("ttft_s", "mean"), 1, 3),
    ("TTFT: p50 (s)", ("ttft_s", "p50"), 1, 3),
    ("TTFT: p99 (s)", ("ttft_s", "p99"), 1, 3),
    ("TTFT of returning turns: mean (s)", ("ttft_returning_turns_s", "mean"), 1, 3),
    ("TPOT: mean (ms)", ("tpot_s", "mean"), 1000, 1),
    ("TPOT: p99 (ms)", ("tpot_s", "p99"), 1000, 1),
    ("end to end a token: mean (ms)", ("normalised_s", "mean"), 1000, 1),
    ("end to end a token: p99 (ms)", ("normalised_s", "p99"), 1000, 1),
    ("end to end: mean (s)", ("end_to_end_s", "mean"), 1, 2),
    ("history cached (%)", ("cached_share_returning",), 100, 1),
    ("peak to median load", ("peak_to_median", "over_time"), 1, 2),
    ("peak to median at worst", ("peak_to_median", "max"), 1, 2),
    ("busy (%)", ("busy_share",), 100, 1),
    ("hints sent", ("hints", "sent"), 1, 0),
    ("hints moved", ("hints", "moved"), 1, 0),
    ("events", ("events",), 1, 0),
    ("real time (s)", ("real_s",), 1, 1),
)


#: Options of fleets with one model, and of devices that models share.
_ONE_MODEL = (
    *("preset", "policy", "users", "sessions", "urgent", "missed", "spurious", "late", "early", "dram_gib", "hbm_gib"),
)
_MODELS = ("like", "ttft_s", "tpot_s")


def run(
    context: typer.Context,
    nodes: Annotated[int, typer.Option(help="nodes of the fleet", min=1, max=4096)] = 8,
    preset: Annotated[
        str, typer.Option(help=f"what a node is: {', '.join(PRESETS)}, or the file of a profile")
    ] = "a100-llama-3.1-8b",
    policy: Annotated[
        str, typer.Option(help=f"one or several with commas: {', '.join(VARIANTS)}")
    ] = "balanced,sticky,recompute",
    trace: Annotated[
        Path | None, typer.Option(help="trace of conversations, as for `upbeat bench`; generated ones by default")
    ] = None,
    users: Annotated[
        int,
        typer.Option(
            help="number of users, each with one conversation after the other; 0: at the trace's times", min=0
        ),
    ] = 64,
    minutes: Annotated[float, typer.Option(help="of virtual time, with --users", min=0.1)] = 10.0,
    time_scale: Annotated[float, typer.Option(help="the trace's times are multiplied by this", min=0.0001)] = 1.0,
    length_scale: Annotated[
        float, typer.Option(help="the trace's lengths are multiplied by this", min=0.0001, max=1.0)
    ] = 1.0,
    sessions: Annotated[int, typer.Option(help="generated conversations", min=1)] = 2000,
    urgent: Annotated[float, typer.Option(help="share of conversations of priority -1", min=0.0, max=1.0)] = 0.0,
    missed: Annotated[float, typer.Option(help="share of requests without a hint", min=0.0, max=1.0)] = 0.0,
    spurious: Annotated[float, typer.Option(help="hints without a request, per request", min=0.0)] = 0.0,
    late: Annotated[
        float, typer.Option(help="share of hints that come 10 s after typing began", min=0.0, max=1.0)
    ] = 0.0,
    early: Annotated[
        float, typer.Option(help="share of hints that come 30 s before typing begins", min=0.0, max=1.0)
    ] = 0.0,
    dram_gib: Annotated[float | None, typer.Option(help="DRAM of a node for KV, GiB")] = None,
    hbm_gib: Annotated[float | None, typer.Option(help="HBM of a node for KV, GiB")] = None,
    models: Annotated[
        int | None, typer.Option(help="a generated trace of this many models, which share each node's device", min=1)
    ] = None,
    like: Annotated[str, typer.Option(help=f"with --models: {', '.join(PROFILES)}")] = "hyperbolic",
    sharing: Annotated[
        str | None,
        typer.Option(
            help="how models share a device; for the models that --trace names, or with --models (default: prism). One "
            f"or several with commas: {', '.join(SHARINGS)}"
        ),
    ] = None,
    ttft_s: Annotated[float, typer.Option(help="objective of each of several models", min=1e-6)] = 1.0,
    tpot_s: Annotated[float, typer.Option(help="objective of each of several models", min=1e-6)] = 0.05,
    seed: Annotated[int, typer.Option(help="equal seeds give equal runs")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    out: Annotated[Path | None, typer.Option(help="also write the JSON here")] = None,
) -> None:
    """Simulate a fleet in virtual time with the production cores, under one policy or several."""
    console = Console(stderr=as_json)
    try:
        _check(context, trace, models, sharing)
        if models is not None or sharing is not None:
            requests = generate(models, minutes * 60, seed, like) if models is not None else read_models(_given(trace))
            names = [f"m{n:02d}" for n in range(models)] if models is not None else sorted({r.model for r in requests})
            if not requests:
                raise ValueError("the trace has no request; give more --minutes or --models")
            shared = ModelTrace.of(requests, names, time_scale=time_scale, length_scale=length_scale)
            console.print(described(statistics(requests, models=len(names))), soft_wrap=True)
            by_sharing: dict[str, dict[str, Any]] = {}
            for each in parse_sharings(sharing or "prism"):
                with console.status(f"{each} ..."):
                    by_sharing[each] = simulated(shared, nodes, each, Slo(ttft_s, tpot_s))
                shown = table_of(by_sharing[each]["models"], by_sharing[each]["attainment"])
                shown.title = f"{each}: {nodes} devices, {len(names)} models, seed {seed}"
                if not as_json:
                    console.print(shown)
            if not as_json:
                console.print(overall(by_sharing), soft_wrap=True)
            _leave(
                provenance()
                | {
                    "settings": {
                        "nodes": nodes,
                        "load": f"generated like {like}" if trace is None else trace.name,
                        "models": shared.names,
                        "minutes": minutes if models is not None else None,
                        "time_scale": time_scale,
                        "length_scale": length_scale,
                        "ttft_s": ttft_s,
                        "tpot_s": tpot_s,
                        "seed": seed,
                    },
                    "sharing": by_sharing,
                },
                out,
                as_json,
            )
            return
        kind = node_kind(preset)
        kind = replace(
            kind,
            hbm_bytes=kind.hbm_bytes if hbm_gib is None else hbm_gib * (1 << 30),
            dram_bytes=kind.dram_bytes if dram_gib is None else dram_gib * (1 << 30),
        )
        variants = parse_variants(policy)
        fits = min(kind.max_tokens, most_tokens(coarsened(kind)))
        said = scripts(
            trace_sessions(trace, sessions=sessions, seed=seed),
            seed=seed,
            time_scale=time_scale,
            length_scale=length_scale,
            max_tokens=fits,
            urgent=urgent,
        )
        habits = {DEFAULT_TENANT: Habits(missed=missed, spurious=spurious, late=late, early=early, expected=False)}
        limit_s = minutes * 60 if users else float("inf")
        base = Run(
            kind, nodes, variants[0], users, limit_s, seed, warm_up_s=limit_s / 10 if users else 0.0, habits=habits
        )
        found: dict[str, dict[str, Any]] = {}
        for variant in variants:
            with console.status(f"{variant.name} ..."):
                found[variant.name] = simulate(replace(base, variant=variant), said).figures
    except (TraceError, ConfigError, OSError, ValueError) as e:
        Console(stderr=True).print(f"[red]upbeat simulate:[/red] {e}", soft_wrap=True)
        raise typer.Exit(1) from e
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    document = provenance() | {
        "settings": {
            "nodes": nodes,
            "preset": kind.name,
            "load": "generated" if trace is None else trace.name,
            "users": users,
            "minutes": minutes if users else None,
            "time_scale": time_scale,
            "length_scale": length_scale,
            "conversations": len(said),
            "urgent": urgent,
            "hints": {"missed": missed, "spurious": spurious, "late": late, "early": early},
            "seed": seed,
        },
        "policies": found,
    }
    _leave(document, out, as_json)
    if not as_json:
        console.print(
            table(
                found,
                f"{nodes} nodes of {kind.name}, "
                + (f"{users} users" if users else "at the trace's times")
                + f", seed {seed}",
            )
        )


def _check(context: typer.Context, trace: Path | None, models: int | None, sharing: str | None) -> None:
    """Raises ConfigError for flags that exclude each other."""

    def given(names: Sequence[str]) -> str:
        flags = [n for n in names if getattr(context.get_parameter_source(n), "name", "") == "COMMANDLINE"]
        return "--" + flags[0].replace("_", "-") if flags else ""

    if models is not None and trace is not None:
        raise ConfigError("give one of --trace FILE and --models N, which generates one")
    if sharing is not None and trace is None and models is None:
        raise ConfigError("--sharing needs models: give --models N, or a --trace that names its models")
    if (models is not None or sharing is not None) and (flag := given(_ONE_MODEL)):
        raise ConfigError(f"{flag} is of fleets with one model; leave it out with --models or --sharing")
    if models is None and sharing is None and (flag := given(_MODELS)):
        raise ConfigError(f"{flag} is of several models; give --models or --sharing, or leave {flag} out")
    if models is None and (flag := given(("like",))):
        raise ConfigError(f"{flag} is of generated traces; give --models, or leave it out")


def _given(trace: Path | None) -> Path:
    assert trace is not None, "checked before"
    return trace


def _leave(document: dict[str, Any], out: Path | None, as_json: bool) -> None:
    """Write the figures, and print them as JSON."""
    if out is not None:
        write_json(out, document)
    if as_json:
        typer.echo(json.dumps(document, indent=2))


def parse_variants(text: str) -> list[Variant]:
    """Variants from a comma-separated list. Raises ValueError naming the unknown one and those that exist."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in VARIANTS:
            raise ValueError(f"unknown policy {name!r}; there are {', '.join(VARIANTS)}")
    if not names:
        raise ValueError(f"no policy given; there are {', '.join(VARIANTS)}")
    return [VARIANTS[name] for name in dict.fromkeys(names)]


def table(found: Mapping[str, Mapping[str, Any]], title: str) -> PolicyTables:
    """A row a policy, a column a figure; figures that no policy has are omitted."""
    shown = {}
    for heading, path, factor, digits in _FIGURES:
        values = [_at(figures, path) for figures in found.values()]
        if any(v is not None for v in values):
            shown[heading] = ["-" if v is None else f"{v * factor:.{digits}f}" for v in values]
    return PolicyTables(title, list(found), shown)


def _at(figures: Mapping[str, Any], path: tuple[str, ...]) -> float | None:
    value: Any = figures
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return None if value is None else float(value)
