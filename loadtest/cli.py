"""`upbeat bench`: replay a trace's conversations under one policy or several, and show the figures side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from loadtest.client import Outcome
from loadtest.policies import fixed_answers, model_max_tokens, parse_policies, run_policy
from loadtest.report import provenance, side_by_side, write_json
from loadtest.sessions import find_sessions, first_requests
from loadtest.stack import Stack, StackError, ending_on_sigterm
from loadtest.traces import TraceError, read_trace
from loadtest.workload import PlannedSession, fitting_scale, longest_tokens, plan

BUNDLED_MODEL = Path(__file__).parents[1] / "models" / "demo"
#: Left of the model's context for what estimates get wrong.
_CONTEXT_MARGIN = 0.98


def bench(
    trace: Annotated[Path, typer.Option(help="trace to replay: Mooncake, Bailian, Azure, BurstGPT or ShareGPT, told apart by content")],
    policy: Annotated[str, typer.Option(help="recompute, sticky, balanced, or several with commas")] = "recompute,sticky,balanced",
    requests: Annotated[int, typer.Option(help="how many requests of the trace to send", min=1)] = 200,
    time_scale: Annotated[float, typer.Option(help="all times are multiplied by this; 0.5 is twice as fast", min=0.0001)] = 1.0,
    min_turns: Annotated[int, typer.Option(help="only sessions with at least so many turns", min=1)] = 1,
    model: Annotated[Path | None, typer.Option(help="model directory; the bundled demo model by default")] = None,
    nodes: Annotated[int, typer.Option(help="nodes of each stack", min=1, max=256)] = 2,
    hbm_gib: Annotated[float | None, typer.Option(help="HBM of a node for KV, GiB")] = None,
    dram_gib: Annotated[float | None, typer.Option(help="DRAM arena of a node, GiB")] = None,
    length_scale: Annotated[float | None, typer.Option(help="words a trace token; by default the longest session just fits")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="at most so many tokens an answer", min=1)] = None,
    seed: Annotated[int, typer.Option(help="of the typing times")] = 1,
    out: Annotated[Path | None, typer.Option(help="where the JSON goes; shown on the screen otherwise")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print nothing but JSON; the rest goes to standard error")] = False,
) -> None:
    """Replay a trace on a stack of its own per policy and compare: TTFT, TPOT, end to end, cache hits, imbalance, hints."""
    console = Console(stderr=as_json)
    try:
        with ending_on_sigterm():
            document = compare(
                trace=trace,
                policy=policy,
                requests=requests,
                time_scale=time_scale,
                min_turns=min_turns,
                model=model,
                nodes=nodes,
                hbm_gib=hbm_gib,
                dram_gib=dram_gib,
                length_scale=length_scale,
                max_tokens=max_tokens,
                seed=seed,
                console=console,
            )
    except (TraceError, StackError, OSError, ValueError) as e:
        console.print(f"[red]upbeat bench:[/red] {e}", soft_wrap=True)
        raise typer.Exit(1) from e
    except KeyboardInterrupt:
        console.print("stopped; nothing is left running")
        raise typer.Exit(130) from None
    if out is not None:
        write_json(out, document)
        console.print(f"figures with every request's times: {out}")
    if out is None or as_json:
        shown = {name: {k: v for k, v in f.items() if k != "outcomes"} for name, f in document["policies"].items()}
        Console().print_json(data=document | {"policies": shown})
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
    """What `bench` does, as a document of figures; prints the table. Raises TraceError, StackError, ValueError, OSError."""
    console = console or Console()
    policies = parse_policies(policy)
    model_directory = (model or BUNDLED_MODEL).absolute()
    sessions = first_requests(find_sessions(read_trace(trace)), requests, min_turns)
    count = sum(len(s.turns) for s in sessions)
    if not count:
        raise ValueError(f"{trace} has no session of at least {min_turns} turns")
    limit = max_context_tokens or (model_max_tokens(model_directory) if length_scale is None else 0)
    scale = length_scale or fitting_scale(sessions, int(limit * _CONTEXT_MARGIN), max_tokens)
    planned = plan(sessions, length_scale=scale, time_scale=time_scale, seed=seed, max_answer_tokens=max_tokens)
    console.print(
        f"{count} requests of {len(sessions)} sessions from {trace.name}; lengths × {scale:g} "
        f"(longest about {longest_tokens(sessions, scale, max_tokens)} tokens), times × {time_scale:g}, seed {seed}"
    )
    results: dict[str, dict[str, Any]] = {}
    for chosen in policies:
        stack = Stack(
            model=model_directory,
            nodes=nodes,
            policy=chosen.placement,
            cache=chosen.cache,
            hbm_gib=hbm_gib,
            dram_gib=dram_gib,
            settings=settings,
            launcher=launcher,
        )
        with _PolicyProgress(console, chosen.name, planned) as (progress, on_done):
            with stack:
                results[chosen.name] = run_policy(chosen, stack, planned, body=fixed_answers(model_directory), on_done=on_done)
            progress.refresh()
        for error in results[chosen.name]["errors"]:
            console.print(f"[red]{chosen.name}: {error}[/red]", soft_wrap=True)
    console.print(side_by_side(results, f"{trace.name}: {count} requests, {nodes} nodes, {model_directory.name}"))
    return provenance() | {
        "trace": trace.name,
        "settings": {
            "requests": count,
            "sessions": len(sessions),
            "min_turns": min_turns,
            "model": model_directory.name,
            "nodes": nodes,
            "hbm_gib": hbm_gib,
            "dram_gib": dram_gib,
            "length_scale": scale,
            "time_scale": time_scale,
            "max_answer_tokens": max_tokens,
            "seed": seed,
        },
        "policies": results,
    }


class _PolicyProgress:
    """A progress line for one policy; gives the callback that moves it."""

    def __init__(self, console: Console, name: str, sessions: list[PlannedSession]) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console)
        self._name, self._total, self._failed = name, sum(len(s.turns) for s in sessions), 0

    def __enter__(self) -> tuple[Progress, Callable[[Outcome], None]]:
        self._progress.start()
        self._task = self._progress.add_task(f"{self._name}: starting a stack", total=self._total)
        return self._progress, self._done

    def _done(self, outcome: Outcome) -> None:
        self._failed += outcome.error is not None
        failed = f", {self._failed} failed" if self._failed else ""
        self._progress.update(self._task, advance=1, description=f"{self._name}{failed}")

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
