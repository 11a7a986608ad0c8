"""`upbeat finetune`: starts a fine-tuning job and shows it until it ends; lists, shows and cancels jobs."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from cli.client import FAILED, FINE, Gateway
from cli.options import DEFAULT_URL, Json, Key, Url, number_option, whole_option
from cli.printing import console, print_json
from contracts.errors import ConfigError, InvalidRequest
from contracts.finetune import Job, JobState, Settings, check_job
from runtime.training_file import check_file

if TYPE_CHECKING:  # gRPC takes a moment to import, and most commands need none
    from cli.finetune_calls import Jobs

#: Seconds between two looks at a job.
EVERY_S = 0.5
_INTERRUPTED = 130
_USUAL = Settings()
_Id = Annotated[str, typer.Argument(metavar="JOB")]
_Scheduler = Annotated[
    str,
    typer.Option(
        "--scheduler",
        envvar="UPBEAT_SCHEDULER",
        metavar="HOST:PORT",
        help="The fleet's first scheduler.  [default: as the gateway says]",
        show_default=False,
    ),
]


def commands() -> typer.Typer:
    """The group of commands."""
    group = typer.Typer(
        name="finetune",
        help="Train an adapter of a served model beside serving. With --model, --data and --out: start a job and show "
        "it until it ends; Ctrl-C leaves it running.",
        add_completion=False,
        rich_markup_mode=None,
        invoke_without_command=True,
    )
    group.callback()(start)
    group.command("list")(list_all)
    group.command()(show)
    group.command()(cancel)
    return group


def start(
    context: typer.Context,
    model: Annotated[str, typer.Option(metavar="NAME", help="A served model, by its name in the API.")] = "",
    data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSONL: `messages` or `text` a line; all nodes see this path.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A new directory for checkpoints and result; all nodes see it.")
    ] = None,
    validation: Annotated[Path | None, typer.Option(metavar="FILE", help="Validation data, as --data.")] = None,
    suffix: Annotated[str, typer.Option(help="Names the adapter: MODEL:SUFFIX.")] = "adapter",
    register: Annotated[bool, typer.Option("--register", help="Serve the result as MODEL:SUFFIX.")] = False,
    tpot_ms: Annotated[
        float, number_option("Milliseconds an output token that serving keeps; 0: the model's target.")
    ] = _USUAL.tpot_ms,
    rank: Annotated[int, whole_option("Of LoRA.")] = _USUAL.rank,
    alpha: Annotated[float, number_option("Of LoRA.")] = _USUAL.alpha,
    dropout: Annotated[float, number_option("Of LoRA.")] = _USUAL.dropout,
    epochs: Annotated[int, whole_option("Passes over the data.")] = _USUAL.epochs,
    batch_size: Annotated[int, whole_option("Examples a step.")] = _USUAL.batch_size,
    learning_rate: Annotated[float, number_option("Of AdamW.")] = _USUAL.learning_rate,
    weight_decay: Annotated[float, number_option("Of AdamW.")] = _USUAL.weight_decay,
    warmup_ratio: Annotated[float, number_option("Part of the steps with a rising rate.")] = _USUAL.warmup_ratio,
    max_tokens: Annotated[int, whole_option("Tokens of an example; 0: as many as fit.")] = _USUAL.max_tokens,
    seed: Annotated[int, whole_option("The same seed and data give the same adapter.")] = _USUAL.seed,
    checkpoint_every: Annotated[int, whole_option("Steps between checkpoints.")] = _USUAL.checkpoint_every,
    scheduler: _Scheduler = "",
    url: Url = DEFAULT_URL,
    key: Key = "",
    as_json: Json = False,
) -> int:
    """Start a job and show it until it ends."""
    if context.invoked_subcommand is not None:
        return FINE
    if not model or data is None or out is None:
        raise ConfigError(
            "--model, --data and --out start a job, such as `upbeat finetune --model NAME --data FILE --out DIR`; "
            "`upbeat finetune list` shows those that are there"
        )
    settings = Settings(
        rank=rank,
        alpha=alpha,
        dropout=dropout,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        warmup_ratio=warmup_ratio,
        epochs=epochs,
        batch_size=batch_size,
        max_tokens=max_tokens,
        seed=seed,
        checkpoint_every=checkpoint_every,
        tpot_ms=tpot_ms,
    )
    job = Job(
        f"ftjob-{secrets.token_hex(12)}",
        "",
        model,
        _checked("--data", data),
        _new(out),
        _checked("--validation", validation) if validation is not None else "",
        suffix,
        register,
        time.time(),
        settings,
    )
    try:
        check_job(job)
    except InvalidRequest as e:
        raise ConfigError(f"--{str(e.param).replace('_', '-')}: {e.message}") from None
    from contracts.finetune_wire import job_to_wire

    jobs = _jobs(scheduler, url, key)
    jobs.submit(job_to_wire(job))
    return follow(console(), jobs, job.id, as_json=as_json)


def list_all(
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Number of jobs, the newest first.")] = 20,
    scheduler: _Scheduler = "",
    url: Url = DEFAULT_URL,
    key: Key = "",
    as_json: Json = False,
) -> None:
    """List jobs of all tenants, the newest first."""
    from cli.finetune_view import as_data, job_table

    found = _jobs(scheduler, url, key).all(limit)
    if as_json:
        print_json({"object": "list", "data": [as_data(one) for one in found]})
    elif found:
        console().print(job_table(found))
    else:
        console().print("no fine-tuning jobs yet: `upbeat finetune --model NAME --data FILE --out DIR` starts one")


def show(job_id: _Id, scheduler: _Scheduler = "", url: Url = DEFAULT_URL, key: Key = "", as_json: Json = False) -> None:
    """Show a job: how far it is, its losses, and what happened to it."""
    from cli.finetune_view import as_data, shown

    found = _jobs(scheduler, url, key).get(job_id)
    if as_json:
        print_json(as_data(found))
    else:
        screen = console()
        screen.print(shown(found, min(screen.width, 100)))


def cancel(
    job_id: _Id, scheduler: _Scheduler = "", url: Url = DEFAULT_URL, key: Key = "", as_json: Json = False
) -> None:
    """Cancel a job. Its checkpoints stay."""
    from cli.finetune_view import as_data

    found = _jobs(scheduler, url, key).cancel(job_id)
    if as_json:
        print_json(as_data(found))
    else:
        console().print(f"{found.progress.state}: {job_id}")


def follow(screen: Console, jobs: Jobs, job_id: str, *, as_json: bool) -> int:
    """Show a job until it ends; the exit status. A terminal gets a picture, a pipe the job's events, or JSON."""
    from cli.finetune_view import picture

    try:
        if as_json:
            last = _print_changes(jobs, job_id)
        elif screen.is_terminal:
            with Live(console=screen, auto_refresh=False) as live:
                for last in _looks(jobs, job_id):
                    live.update(picture(last, min(screen.width, 100)), refresh=True)
        else:
            last = _print_events(screen, jobs, job_id)
    except KeyboardInterrupt:
        screen.print(
            f"\nthe job goes on; `upbeat finetune show {job_id}` shows it, `upbeat finetune cancel {job_id}` ends it"
        )
        return _INTERRUPTED
    return FINE if last.progress.state == JobState.SUCCEEDED else FAILED


def _looks(jobs: Jobs, job_id: str) -> Iterator[Any]:
    """The job again and again, until it has ended."""
    while True:
        found = jobs.get(job_id)
        yield found
        if JobState(found.progress.state).ended:
            return
        time.sleep(EVERY_S)


def _print_changes(jobs: Jobs, job_id: str) -> Any:
    from cli.finetune_view import as_data

    before, found = None, None
    for found in _looks(jobs, job_id):
        if (data := as_data(found)) != before:
            before = data
            print(json.dumps(data), flush=True)
    return found


def _print_events(screen: Console, jobs: Jobs, job_id: str) -> Any:
    from cli.finetune_view import event_line, shown

    seen, found = 0, None
    screen.print(job_id)
    for found in _looks(jobs, job_id):
        for event in found.events:
            if event.number > seen:
                seen = event.number
                screen.print(event_line(event))
    if found is not None:
        screen.print(shown(found, 100))
    return found


def _jobs(scheduler: str, url: str, key: str) -> Jobs:
    """The jobs of a fleet. Raises CallFailed."""
    from cli.finetune_calls import Jobs, first_scheduler

    return Jobs(first_scheduler(Gateway(url, key or None), scheduler))


def _checked(flag: str, path: Path) -> str:
    """The absolute path of a file whose lines are examples. Raises ConfigError naming the line."""
    try:
        check_file(path)
    except InvalidRequest as e:
        raise ConfigError(f"{flag} {path}: {e.message}") from None
    except OSError as e:
        raise ConfigError(f"{flag} {path} cannot be read ({e.strerror}); give a JSONL file") from None
    return str(path.resolve())


def _new(path: Path) -> str:
    """The absolute path of a directory that is empty or does not exist. Raises ConfigError."""
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigError(f"--out {path} is there already and holds something; give a new directory")
    except OSError as e:
        raise ConfigError(f"--out {path} cannot be used ({e.strerror}); give a new directory") from None
    return str(path.resolve())
