"""`upbeat bench`: replays a trace's conversations under several policies and compares their figures; with `--url`, a
trace of several models on a running stack."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from contracts.errors import ConfigError
from loadtest.compare.cli import Bar
from loadtest.compare.load import read_workload
from loadtest.compare.run import compare as run_comparison
from loadtest.compare.settings import TargetFile, UpbeatSection, WorkloadSection
from loadtest.html_report import html_report
from loadtest.many_models import PROFILES
from loadtest.model_replay import generated, prepare, read_models, replayed
from loadtest.policies import parse_policies
from loadtest.report import side_by_side, write_json, write_text
from loadtest.stack import StackError, ending_on_sigterm
from loadtest.traces import TraceError
from runtime.model_directory import model_directory

BUNDLED_MODEL = Path(__file__).parents[1] / "models" / "demo"


#: Options of stacks that are started here, and of a running one.
_STARTED = ("policy", "nodes", "hbm_gib", "dram_gib", "html")
_RUNNING = ("like", "ttft_s", "tpot_s", "hints", "key_env")


def bench(
    context: typer.Context,
    trace: Annotated[
        Path | None,
        typer.Option(help="trace to replay: Mooncake, Bailian, Azure, BurstGPT or ShareGPT, told apart by content"),
    ] = None,
    policy: Annotated[
        str, typer.Option(help="recompute, sticky, balanced, or several with commas")
    ] = "recompute,sticky,balanced",
    requests: Annotated[int, typer.Option(help="how many requests of the trace to send", min=1)] = 200,
    time_scale: Annotated[
        float, typer.Option(help="all times are multiplied by this; 0.5 is twice as fast", min=0.0001)
    ] = 1.0,
    min_turns: Annotated[int, typer.Option(help="only sessions with at least this many turns", min=1)] = 1,
    model: Annotated[
        str | None, typer.Option(help="model directory or hub id, owner/name[@revision]; the bundled model by default")
    ] = None,
    nodes: Annotated[int, typer.Option(help="nodes of each stack", min=1, max=256)] = 2,
    hbm_gib: Annotated[float | None, typer.Option(help="HBM of a node for KV, GiB")] = None,
    dram_gib: Annotated[float | None, typer.Option(help="DRAM arena of a node, GiB")] = None,
    length_scale: Annotated[
        float | None, typer.Option(help="words a trace token; by default the longest session just fits")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="most tokens of an answer", min=1)] = None,
    seed: Annotated[int, typer.Option(help="of the typing times")] = 1,
    out: Annotated[Path | None, typer.Option(help="where the JSON goes; shown on the screen otherwise")] = None,
    html: Annotated[Path | None, typer.Option(help="a report as one file: tables, plots, settings")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="print nothing but JSON; the rest goes to standard error")
    ] = False,
    url: Annotated[
        str | None, typer.Option(help="a running stack that serves the trace's models; none is started")
    ] = None,
    models: Annotated[int | None, typer.Option(help="with --url: a generated trace of this many models", min=1)] = None,
    like: Annotated[str, typer.Option(help=f"with --models: {', '.join(PROFILES)}")] = "hyperbolic",
    ttft_s: Annotated[
        float | None, typer.Option(help="with --url: objective, instead of each model's", min=1e-6)
    ] = None,
    tpot_s: Annotated[
        float | None, typer.Option(help="with --url: objective, instead of each model's", min=1e-6)
    ] = None,
    hints: Annotated[bool, typer.Option("--hints", help="with --url: an advisory before each request")] = False,
    key_env: Annotated[str, typer.Option(help="with --url: environment variable of the API key")] = "",
) -> None:
    """Replay a trace on a stack of its own per policy and compare: TTFT, TPOT, end to end, cache hits, imbalance,
    hints. With --url: on a running stack, by model, with the attainment of objectives."""
    console = Console(stderr=as_json)
    try:
        with ending_on_sigterm():
            _check(context, trace, url, models)
            directory = model_directory(model, "--model") if model is not None else None
            if url is not None:
                load = prepare(
                    generated(models, requests, seed, like) if models is not None else read_models(_given(trace)),
                    url=url,
                    count=requests,
                    seed=seed,
                    time_scale=time_scale,
                    min_turns=min_turns,
                    length_scale=length_scale,
                    max_tokens=max_tokens,
                    hints=hints,
                    ttft_s=ttft_s,
                    tpot_s=tpot_s,
                    model=directory,
                    key_env=key_env,
                    models=models,
                )
                by_model = replayed(load, trace.name if trace is not None else f"generated like {like}", console)
                _leave(by_model, out, as_json, console, by_model["failed"] > 0)
                return
            trace = _given(trace)
            document = compare(
                trace=trace,
                policy=policy,
                requests=requests,
                time_scale=time_scale,
                min_turns=min_turns,
                model=directory,
                nodes=nodes,
                hbm_gib=hbm_gib,
                dram_gib=dram_gib,
                length_scale=length_scale,
                max_tokens=max_tokens,
                seed=seed,
                console=console,
            )
    except (TraceError, StackError, ConfigError, OSError, ValueError) as e:
        console.print(f"[red]upbeat bench:[/red] {e}", soft_wrap=True)
        raise typer.Exit(1) from e
    except KeyboardInterrupt:
        console.print("stopped before anything was measured; nothing is left running")
        raise typer.Exit(130) from None
    if html is not None:
        write_text(html, html_report(document["comparison"], f"upbeat bench: {policy}, {trace.name}"))
        console.print(f"report: {html}", soft_wrap=True)
    del document["comparison"]
    if out is not None:
        write_json(out, document)
        console.print(f"figures with every request's times: {out}")
    if out is None or as_json:
        shown = {name: {k: v for k, v in f.items() if k != "outcomes"} for name, f in document["policies"].items()}
        Console().print_json(data=document | {"policies": shown})
    if document["interrupted"]:
        raise typer.Exit(130)
    if any(f["failed"] for f in document["policies"].values()):
        raise typer.Exit(1)


def _check(context: typer.Context, trace: Path | None, url: str | None, models: int | None) -> None:
    """Raises ConfigError for flags that exclude each other."""

    def given(names: Sequence[str]) -> str:
        flags = [n for n in names if getattr(context.get_parameter_source(n), "name", "") == "COMMANDLINE"]
        return "--" + flags[0].replace("_", "-") if flags else ""

    if (trace is None) == (models is None):
        raise ConfigError("give one of --trace FILE and --models N (a generated trace, for a running stack at --url)")
    if url is None and models is not None:
        raise ConfigError("--models is for a running stack that serves several models; give its address with --url")
    if url is None and (flag := given(_RUNNING)):
        raise ConfigError(f"{flag} is for a running stack; give its address with --url, or leave {flag} out")
    if url is not None and (flag := given(_STARTED)):
        raise ConfigError(f"{flag} is of stacks that are started here; leave it out with --url")
    if models is None and (flag := given(("like",))):
        raise ConfigError(f"{flag} is of generated traces; give --models, or leave it out")


def _given(trace: Path | None) -> Path:
    assert trace is not None, "checked before"
    return trace


def _leave(document: dict[str, Any], out: Path | None, as_json: bool, console: Console, failed: bool) -> None:
    """Write or print the figures of a running stack; exit with 1 if a request failed, 130 after Ctrl-C."""
    if out is not None:
        write_json(out, document)
        console.print(f"figures with every request's times: {out}")
    if as_json:
        Console().print_json(data={k: v for k, v in document.items() if k != "outcomes"})
    if document["interrupted"]:
        raise typer.Exit(130)
    if failed:
        raise typer.Exit(1)


def compare(
    *,
    trace: Path,
    policy: str,
    requests: int,
    time_scale: float,
    min_turns: int = 1,
    model: Path | None = None,
    nodes: int = 2,
    hbm_gib: float | None = None,
    dram_gib: float | None = None,
    length_scale: float | None = None,
    max_tokens: int | None = None,
    max_context_tokens: int | None = None,
    seed: int = 1,
    settings: dict[str, Any] | None = None,
    launcher: Sequence[str] | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Run `bench` and print its table. Returns figures: `policies`, and `comparison` for a report. After Ctrl-C it has
    the results so far, and `interrupted` is true. Raises TraceError, StackError, ConfigError, ValueError, OSError."""
    console = console or Console()
    directory = (model or BUNDLED_MODEL).absolute()
    stack = UpbeatSection(nodes=nodes, model=directory, hbm_gib=hbm_gib, dram_gib=dram_gib, settings=settings or {})
    targets = [
        TargetFile(name=p.name, upbeat=stack.model_copy(update={"policy": p.name})) for p in parse_policies(policy)
    ]
    load = read_workload(
        WorkloadSection(
            trace=trace.absolute(),
            requests=requests,
            min_turns=min_turns,
            time_scales=[time_scale],
            length_scale=length_scale,
            max_context_tokens=max_context_tokens,
            max_answer_tokens=max_tokens,
            model_directory=directory,
            seed=seed,
        )
    )
    count, sessions = load.described["requests"], load.described["sessions"]
    console.print(
        f"{count} requests of {sessions} sessions from {trace.name}; lengths × {load.length_scale:g} "
        f"(longest about {load.described['longest_session_tokens']} tokens), times × {time_scale:g}, seed {seed}"
    )
    with Bar(console) as bar:
        made = run_comparison(targets, load, 1, bar, launcher=list(launcher) if launcher else None)
    for name, error in made.errors.items():
        raise StackError(f"{name}: {error}")
    results = {name: runs[0] for name, points in made.runs.items() for runs in points.values()}
    if made.interrupted and not results:
        raise KeyboardInterrupt
    for name, found in results.items():
        for error in found["errors"]:
            console.print(f"[red]{name}: {error}[/red]", soft_wrap=True)
    console.print(side_by_side(results, f"{trace.name}: {count} requests, {nodes} nodes, {directory.name}"))
    comparison = made.document()
    return {key: comparison[key] for key in ("date", "machine", "versions", "interrupted")} | {
        "trace": trace.name,
        "settings": {
            "requests": count,
            "sessions": sessions,
            "min_turns": min_turns,
            "model": directory.name,
            "nodes": nodes,
            "hbm_gib": hbm_gib,
            "dram_gib": dram_gib,
            "length_scale": load.length_scale,
            "time_scale": time_scale,
            "max_answer_tokens": max_tokens,
            "seed": seed,
        },
        "policies": results,
        "comparison": comparison,
    }
