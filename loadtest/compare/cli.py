"""`upbeat bench compare A.yaml B.yaml …`: the command line, its progress, tables and files."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from contracts.errors import ConfigError
from loadtest.compare.load import Workload, read_workload
from loadtest.compare.run import Comparison
from loadtest.compare.run import compare as run_comparison
from loadtest.compare.settings import TargetFile, load_target, load_workload, one_workload
from loadtest.compare.summary import FIGURES, shown, titled
from loadtest.html_report import html_report
from loadtest.report import write_json, write_text
from loadtest.stack import ending_on_sigterm
from loadtest.traces import TraceError


def compare(
    targets: Annotated[
        list[Path], typer.Argument(help="YAML files, a target each; ratios are to the first", metavar="TARGET.yaml...")
    ],
    workload: Annotated[
        Path | None, typer.Option(help="YAML of the workload; else a target's workload section")
    ] = None,
    repeats: Annotated[int, typer.Option(help="number of measurements of each target", min=1)] = 1,
    out: Annotated[Path | None, typer.Option(help="JSON with every request's times")] = None,
    html: Annotated[Path | None, typer.Option(help="a report as one file: tables, plots, configuration")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="print the figures as JSON; the rest goes to standard error")
    ] = False,
) -> None:
    """Send the same load to several targets, in turn on one machine, and compare: medians, spread, ratios. See
    docs/bench.md.

    A target is an address with OpenAI's API, a stack of our own, or programs to start. Ctrl-C keeps what was measured.
    """
    console = Console(stderr=as_json)
    try:
        with ending_on_sigterm():
            read = [load_target(path) for path in targets]
            load = read_workload(one_workload(read, load_workload(workload) if workload else None))
            folders = {target.name: path.absolute().parent for target, path in zip(read, targets, strict=True)}
            made = watched(read, load, repeats, console, folders)
    except ConfigError as e:
        console.print(f"[red]upbeat bench compare:[/red] {e}", soft_wrap=True)
        raise typer.Exit(2) from e
    except (TraceError, OSError, ValueError) as e:
        console.print(f"[red]upbeat bench compare:[/red] {e}", soft_wrap=True)
        raise typer.Exit(1) from e
    except KeyboardInterrupt:
        console.print("stopped before anything was measured; nothing is left running")
        raise typer.Exit(130) from None
    document = made.document()
    leave(document, console, out, html, "upbeat bench compare: " + ", ".join(t.name for t in read))
    if as_json:
        Console().print_json(data=without_outcomes(document))
    if made.interrupted:
        raise typer.Exit(130)
    if made.errors or any(run["failed"] for points in made.runs.values() for runs in points.values() for run in runs):
        raise typer.Exit(1)


def watched(
    targets: list[TargetFile],
    load: Workload,
    repeats: int,
    console: Console,
    folders: dict[str, Path] | None = None,
    *,
    before: Comparison | None = None,
    kept: Callable[[Comparison], None] = lambda _: None,
    seconds: float = math.inf,
) -> Comparison:
    """Run `run.compare` with a progress bar, and print its tables. Raises ConfigError if two targets have one name."""
    names = [t.name for t in targets]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two targets are called {name!r}; give one of them another `name`")
    told = ", ".join(f"{key} {value}" for key, value in load.described.items())
    console.print(f"{told}; {len(load.points)} loads, {repeats} repeats, seed {load.section.seed}", soft_wrap=True)
    with Bar(console) as bar:
        made = run_comparison(targets, load, repeats, bar, folders=folders, before=before, kept=kept, seconds=seconds)
    for name, error in made.errors.items():
        console.print(f"[red]{name}:[/red] {error}", soft_wrap=True, highlight=False)
    if made.interrupted:
        console.print("stopped; what was measured until then:")
    document = made.document()
    for point in document["points"]:
        table = table_of(document, point["label"])
        if table.row_count:
            console.print(table)
    return made


def table_of(document: dict[str, Any], label: str) -> Table:
    """The table of one load: a column a target, a row a figure; medians, and the spread of several repeats."""
    table = Table(title=label, title_justify="left")
    table.add_column("figure")
    targets = document["targets"]
    for name in targets:
        table.add_column(name, justify="right")
    for name, _, unit, _ in FIGURES:
        found = [target["points"].get(label, {}).get("summary", {}).get(name) for target in targets.values()]
        if any(found):
            table.add_row(titled(name, unit), *(_cell(figure, unit) for figure in found))
    return table


def leave(document: dict[str, Any], console: Console, out: Path | None, html: Path | None, title: str) -> None:
    """Write the requested files."""
    if out is not None:
        write_json(out, document)
        console.print(f"figures with every request's times: {out}", soft_wrap=True)
    if html is not None:
        write_text(html, html_report(document, title))
        console.print(f"report: {html}", soft_wrap=True)


def without_outcomes(document: dict[str, Any]) -> dict[str, Any]:
    """The document without the outcomes of single requests."""

    def cut(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: cut(v) for key, v in value.items() if key != "outcomes"}
        return [cut(v) for v in value] if isinstance(value, list) else value

    return dict(cut(document))


def _cell(figure: dict[str, float] | None, unit: str) -> str:
    if figure is None:
        return "-"
    middle = shown(figure["median"], unit)
    return (
        middle
        if figure["min"] == figure["max"]
        else f"{middle} ({shown(figure['min'], unit)}-{shown(figure['max'], unit)})"
    )


class Bar:
    """A progress bar over all steps, with the time left and the current step. Without a terminal: a line a step."""

    def __init__(self, console: Console) -> None:
        self._console, self._began_s = console, time.monotonic()
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=console)
        self._step, self._what = 0, ""

    def __enter__(self) -> Bar:
        self._progress.start()
        self._task = self._progress.add_task("", total=1.0)
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def step(self, number: int, of: int, what: str) -> None:
        """A step begins."""
        self._step, self._what = number, what
        self._progress.update(self._task, total=float(of), completed=float(number), description=what)
        if not self._console.is_terminal:
            self._console.print(
                f"{time.monotonic() - self._began_s:6.0f} s, step {number + 1} of {of}: {what}", highlight=False
            )

    def share(self, done: float, failed: int) -> None:
        """A request has ended."""
        said = f"{self._what}, {failed} failed" if failed else self._what
        self._progress.update(self._task, completed=self._step + done, description=said)
