"""The command line: registers the commands, and turns errors into one line and an exit status."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any, NoReturn

import typer
from typer.exceptions import TyperException

from cli import certs, checks, finetune, keys, queries, workflows
from cli.autoscale import autoscale
from cli.client import USAGE, CallFailed
from cli.completion import COMPLETE, completion_init, script
from cli.join import join
from cli.leave import leave
from cli.log_lines import logs
from cli.printing import fail
from cli.up import up
from cli.version import root
from cli.vllm_config import vllm_config
from cli.word_order import command_first
from contracts.errors import ConfigError

_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
commands = typer.Typer(
    name="upbeat",
    help="LLM serving for multi-turn work: the KV cache arrives before the request does.",
    epilog="Exit status: 0 fine, 1 failed, 2 wrong usage or setting, 3 no gateway answers, 4 key refused, 5 not "
    "known there, 130 Ctrl-C.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
commands.callback()(root)


def app() -> NoReturn:
    """The `upbeat` program. An error is one line; the exit statuses are in docs/cli.md."""
    status: Any
    if COMPLETE in os.environ:
        completion_init()
    sys.argv[1:] = command_first(sys.argv[1:]) or ["--help"]
    try:
        status = commands(standalone_mode=False)
    except TyperException as e:
        status = fail(e.format_message().replace("\n", " "), USAGE)
    except ConfigError as e:
        status = fail(" ".join(str(e).split()), USAGE)
    except CallFailed as e:
        status = fail(str(e), e.status)
    except typer.Abort:
        status = 130
    except KeyboardInterrupt:
        status = 130
    sys.exit(status if isinstance(status, int) else 0)


def bench(context: typer.Context) -> Any:
    """Replay a trace under several policies (`upbeat bench --help`), or compare targets (`upbeat bench compare
    --help`)."""
    from loadtest.cli import bench as replay
    from loadtest.compare.cli import compare

    program = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    if context.args[:1] == ["compare"]:
        program.command()(compare)
        return program(context.args[1:], prog_name="upbeat bench compare", standalone_mode=False)
    program.command(
        epilog="`upbeat bench compare A.yaml B.yaml` compares any targets; see `upbeat bench compare --help`."
    )(replay)
    return program(context.args, prog_name="upbeat bench", standalone_mode=False)


def simulate(context: typer.Context) -> Any:
    """Simulate a fleet under several policies in virtual time, side by side; see `upbeat simulate --help`."""
    from loadtest.simulate.cli import run

    program = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    program.command()(run)
    return program(context.args, prog_name="upbeat simulate", standalone_mode=False)


def completion(shell: Annotated[str, typer.Argument(metavar="bash|zsh|fish")]) -> None:
    """Print the script that completes commands, flags and session ids: `source <(upbeat completion bash)`."""
    print(script(shell))


for _command in (
    up,
    join,
    leave,
    queries.status,
    queries.models,
    queries.top,
    queries.sessions,
    queries.explain,
    autoscale,
    logs,
    queries.advise,
    queries.invalidate,
    checks.doctor,
    checks.profile,
    vllm_config,
):
    commands.command()(_command)
commands.command(hidden=True)(checks.probe)
commands.command(add_help_option=False, context_settings=_PASS_ON)(bench)
commands.command(add_help_option=False, context_settings=_PASS_ON)(simulate)
commands.command()(completion)
commands.add_typer(keys.commands())
commands.add_typer(certs.commands())
commands.add_typer(workflows.commands())
commands.add_typer(finetune.commands())
