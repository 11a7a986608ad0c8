"""`upbeat bench`: replays a trace's conversations under several policies and compares their figures."""

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
from loadtest.policies import parse_policies
from loadtest.report import side_by_side, write_json, write_text
from loadtest.stack import StackError, ending_on_sigterm
from loadtest.traces import TraceError
from runtime.model_directory import model_directory

BUNDLED_MODEL = Path(__file__).parents[1] / "models" / "demo"


def bench(
    trace: Annotated[
        Path,
        typer.Option(help="trace to replay: Mooncake, Bailian, Azure, BurstGPT or ShareGPT, told apart by content"),
    ],
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
) -> None:
    """Replay a trace on a stack of its own per policy and compare: TTFT, TPOT, end to end, cache hits, imbalance,
    hints."""
    console = Console(stderr=as_json)
    try:
        with ending_on_sigterm():
            document = compare(
                trace=trace,
                policy=policy,
                requests=requests,
                time_scale=time_scale,
                min_turns=min_turns,
                model=model_directory(model, "--model") if model is not None else None,
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
