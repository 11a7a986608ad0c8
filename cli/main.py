"""The command line: `upbeat up` starts a stack, the other commands ask a running one or this machine."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from typer.exceptions import TyperException

from cli import fleet, keys, workflows
from cli.client import USAGE, CallFailed, Gateway, session_pages, session_path
from cli.completion import COMPLETE, completion_init, known_sessions, script
from cli.models import asked_models, show_models
from cli.options import number_option, whole_option
from cli.settings import Flags, resolve
from cli.version import root
from cli.word_order import command_first
from contracts.errors import ConfigError
from runtime.config import cluster_secret, dump_config, with_hashed_keys

commands = typer.Typer(
    name="upbeat",
    help="LLM serving for multi-turn work: the KV cache arrives before the request does.",
    epilog="Exit status: 0 fine, 1 failed, 2 wrong usage or setting, 3 no gateway answers, 4 key refused, 5 not known there, 130 Ctrl-C.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
commands.callback()(root)
_Url = Annotated[str, typer.Option("--url", envvar="UPBEAT_URL", help="Where the gateway answers.")]
_Key = Annotated[str, typer.Option("--key", envvar="UPBEAT_API_KEY", help="A server key, where keys are configured.", show_default=False)]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_Models = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[NAME=]DIR|ID",
        help="A Hugging Face directory, or a hub id: owner/name or owner/name@revision; repeated with names: several.  "
        "[default: the bundled model]",
        show_default=False,
    ),
]
_URL = "http://127.0.0.1:8080"


def app() -> NoReturn:
    """The `upbeat` program. What goes wrong is one line, and the exit status says of which kind it is (docs/cli.md)."""
    status: Any
    if COMPLETE in os.environ:
        completion_init()
    sys.argv[1:] = command_first(sys.argv[1:]) or ["--help"]
    try:
        status = commands(standalone_mode=False)
    except TyperException as e:
        status = _fail(e.format_message().replace("\n", " "), USAGE)
    except ConfigError as e:
        status = _fail(" ".join(str(e).split()), USAGE)
    except CallFailed as e:
        status = _fail(str(e), e.status)
    except typer.Abort:
        status = 130
    except KeyboardInterrupt:
        status = 130
    sys.exit(status if isinstance(status, int) else 0)


@commands.command()
def up(
    nodes: Annotated[int | None, whole_option("Nodes to start: a kvstore and a worker each.  [default: 2]")] = None,
    devices: Annotated[int | None, whole_option("Devices of a node: a worker each, beside one kvstore.  [default: 1]")] = None,
    model: _Models = None,
    revision: Annotated[str | None, typer.Option(metavar="NAME", help="Of a hub id: a branch, a tag or a commit.  [default: main]")] = None,
    port: Annotated[int | None, whole_option("The gateway's port; the stack's other ports follow from it.  [default: 8080]")] = None,
    data: Annotated[Path | None, typer.Option(help="Where KV is kept.  [default: data]")] = None,
    config: Annotated[Path | None, typer.Option(help="Configuration in YAML.")] = None,
    cache: Annotated[str | None, typer.Option(metavar="on|off", help="Keep KV across requests.  [default: on]")] = None,
    hbm_gib: Annotated[
        float | None,
        number_option("Device memory, a device: weights and KV.  [default: 1, or what the weights need; bundled model: little]"),
    ] = None,
    dram_gib: Annotated[float | None, number_option("DRAM for KV, a node.  [default: 2; bundled model: little]")] = None,
    policy: Annotated[str | None, typer.Option(metavar="NAME", help="Placement: balanced, sticky, ...  [default: balanced]")] = None,
    host: Annotated[
        str | None, typer.Option(help="Where the gateway listens; beyond this machine it has keys.  [default: 127.0.0.1]")
    ] = None,
    cors_origin: Annotated[list[str] | None, typer.Option(metavar="ORIGIN", help="Pages of ORIGIN may call; may be repeated.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Logs, locks, pids.  [default: .cache/run, or .cache/run-PORT]")] = None,
    bin_dir: Annotated[Path | None, typer.Option(hidden=True, help="Where the services' programs are.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what happens as JSON, an object a line.")] = False,
) -> int:
    """Start a stack on this machine and keep it running until Ctrl-C."""
    from cli import machine
    from cli.addresses import base_url
    from cli.core.plan import stack_plan
    from cli.demo_memory import SMALL, with_demo_memory
    from cli.display import Display
    from cli.own_key import own_key_of
    from cli.supervisor import Supervisor

    one, several = asked_models(model)
    flags = Flags(nodes, one, port, data, config, cache, hbm_gib, dram_gib, policy, run_dir, revision, host, cors_origin, several, devices)
    resolved, programs = with_demo_memory(asked := resolve(flags), flags), bin_dir or Path(sys.executable).parent
    install = f"install with `make up`, or in the checkout {sys.executable} -m pip install -c constraints.txt -e ."
    for program in {planned.program for planned in stack_plan(1)}:
        if not os.access(programs / program, os.X_OK):
            raise ConfigError(f"{programs / program} is not there; {install}")
    display = Display(as_json=as_json, own_key=own_key_of(resolved))
    # The services inherit both locks: whoever starts a stack here next waits for them, should this launcher be killed.
    locks = [
        machine.take_lock(resolved.data / "lock", "--data", base_url(resolved), display.line),
        machine.take_lock(resolved.run_dir / "lock", "--run-dir", base_url(resolved), display.line),
    ]
    machine.remove_arenas(resolved)
    machine.check_memory(resolved)
    machine.check_ports(resolved)
    machine.warn_of_disk(resolved, display.line)
    if resolved is not asked:
        display.line(SMALL.format(resolved.kv.hbm_gib * 1024, resolved.kv.dram_gib * 1024), "")
    cluster_secret(resolved.data)
    written = resolved.run_dir / "config.yaml"
    written.touch(mode=0o600)
    written.chmod(0o600)
    written.write_text(dump_config(with_hashed_keys(resolved)))
    return asyncio.run(Supervisor(resolved, programs, display, [lock.fileno() for lock in locks]).run())


@commands.command()
def status(url: _Url = _URL, key: _Key = "", as_json: _Json = False) -> int:
    """What the fleet does now. The exit status is 0 when every node serves."""
    gateway = Gateway(url, key or None)
    all_serve = gateway.ask("GET", "/ready?all=1").status == 200
    data = gateway.call("GET", "/v1/fleet")
    if as_json:
        _print_json({"url": url, **data, "all_serve": all_serve})
    else:
        fleet.show_fleet(_console(), all_serve, data)
    return 0 if all_serve else 1


@commands.command()
def models(url: _Url = _URL, key: _Key = "", as_json: _Json = False) -> None:
    """The registered models: which nodes have them, bytes of weights and KV, what callers are promised."""
    data = Gateway(url, key or None).call("GET", "/v1/models")
    if as_json:
        _print_json(data)
    else:
        show_models(_console(), data["data"])


@commands.command()
def top(
    every: Annotated[float, number_option("Seconds between two looks.")] = 2.0,
    rounds: Annotated[int, whole_option("How often; 0: until Ctrl-C.")] = 0,
    url: _Url = _URL,
    key: _Key = "",
    as_json: _Json = False,
) -> None:
    """Show what every node's KV is doing: room, reads, hits, hints, evictions; and the latest sessions."""
    from cli.top import records, watch

    if every <= 0 or rounds < 0:
        raise ConfigError("--every must be more than 0 and --rounds at least 0; give, say, --every 2")
    gateway = Gateway(url, key or None)
    if not as_json:
        watch(_console(), gateway, every, rounds)
        return
    for record in records(gateway, every, rounds):
        print(json.dumps(record), flush=True)


@commands.command()
def sessions(
    session_id: Annotated[
        str, typer.Argument(help="One session: where its KV is.", show_default=False, autocompletion=known_sessions)
    ] = "",
    limit: Annotated[
        int | None, typer.Option(min=1, max=10_000, help="How many sessions to list, the latest used first.", show_default="100")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="List every session, by id; with --json a line a page.")] = False,
    url: _Url = _URL,
    key: _Key = "",
    as_json: _Json = False,
) -> None:
    """List sessions, or show one tier by tier."""
    gateway = Gateway(url, key or None)
    if session_id:
        data = gateway.call("GET", session_path(session_id))
        (_print_json if as_json else partial(fleet.show_session, _console()))(data)
        return
    pages = session_pages(gateway) if everything else [gateway.call("GET", f"/v1/sessions?limit={limit}" if limit else "/v1/sessions")]
    for page in pages:
        if as_json and everything:
            print(json.dumps(page), flush=True)
        elif as_json:
            _print_json(page)
        else:
            fleet.show_sessions(_console(), page, partial(gateway.call, "GET", "/v1/fleet"), last=everything)


@commands.command()
def explain(
    session_id: Annotated[str, typer.Argument(metavar="SESSION", autocompletion=known_sessions)],
    url: _Url = _URL,
    key: _Key = "",
    as_json: _Json = False,
) -> None:
    """Say why a session's last turns and hints went to the nodes to which they went."""
    from cli.explain import lines

    data = Gateway(url, key or None).call("GET", f"{session_path(session_id)}/placement")
    if as_json:
        _print_json(data)
    else:
        _console().print("\n".join(lines(data)))


@commands.command()
def advise(
    session_id: Annotated[str, typer.Argument(metavar="SESSION", autocompletion=known_sessions)],
    expected_arrival: Annotated[float | None, number_option("Seconds until the request comes.")] = None,
    priority: Annotated[int, whole_option("Lower is more urgent.")] = 0,
    ttl_s: Annotated[float | None, number_option("Seconds after the expected arrival until the hint loses its rank.")] = None,
    node: Annotated[str, typer.Option(help="Pin this node, such as node-1.", show_default=False)] = "",
    url: _Url = _URL,
    key: _Key = "",
    as_json: _Json = False,
) -> None:
    """Say that a session is about to speak, so that its KV starts moving now."""
    body: dict[str, Any] = {"session_id": session_id, "expected_arrival": expected_arrival, "priority": priority}
    if ttl_s is not None:
        body["ttl_s"] = ttl_s
    answer = Gateway(url, key or None).call("POST", "/v1/advisory", body, {"x-upbeat-node": node} if node else None)
    _answer(answer, as_json, f"accepted: {session_id}")


@commands.command()
def invalidate(
    session_id: Annotated[str, typer.Argument(metavar="SESSION", autocompletion=known_sessions)],
    url: _Url = _URL,
    key: _Key = "",
    as_json: _Json = False,
) -> None:
    """Say that a session will not speak after all; what was fetched for it is dropped first under pressure."""
    answer = Gateway(url, key or None).call("POST", "/v1/invalidate", {"session_id": session_id})
    _answer(answer, as_json, f"accepted: {session_id}")


@commands.command()
def doctor(
    nodes: Annotated[int | None, whole_option("As for `upbeat up`.")] = None,
    devices: Annotated[int | None, whole_option("As for `upbeat up`.")] = None,
    model: _Models = None,
    revision: Annotated[str | None, typer.Option(metavar="NAME", help="As for `upbeat up`.")] = None,
    port: Annotated[int | None, whole_option("As for `upbeat up`.")] = None,
    data: Annotated[Path | None, typer.Option(help="As for `upbeat up`.")] = None,
    config: Annotated[Path | None, typer.Option(help="As for `upbeat up`.")] = None,
    as_json: _Json = False,
) -> int:
    """Check that this machine can run a stack. The exit status is 0 when nothing stands in the way."""
    from cli.demo_memory import with_demo_memory
    from cli.doctor import examine, show
    from cli.settings import layout

    one, several = asked_models(model)
    flags = Flags(nodes=nodes, model=one, port=port, data=data, config=config, revision=revision, models=several, devices=devices)
    findings = examine(with_demo_memory(layout(flags), flags))
    failed = [finding for finding in findings if finding.level == "fail"]
    if as_json:
        _print_json({"ok": not failed, "findings": [{name: getattr(f, name) for name in f.__slots__} for f in findings]})
    else:
        show(_console(), findings)
    return 1 if failed else 0


@commands.command()
def profile(
    model: Annotated[str | None, typer.Option(metavar="DIR|ID", help="As for `upbeat up`.")] = None,
    revision: Annotated[str | None, typer.Option(metavar="NAME", help="As for `upbeat up`.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Half a minute: fewer points, more noise.")] = False,
    out: Annotated[Path | None, typer.Option(help="Where it goes, instead of beside the model (or to --data).")] = None,
    show: Annotated[bool, typer.Option("--show", help="Show what was measured before; measure nothing.")] = False,
    nodes: Annotated[int | None, whole_option("As for `upbeat up`: a worker's share of the cores follows from it.")] = None,
    data: Annotated[Path | None, typer.Option(help="As for `upbeat up`; the SSD that is measured is the one it lies on.")] = None,
    config: Annotated[Path | None, typer.Option(help="Configuration in YAML.")] = None,
    as_json: _Json = False,
) -> None:
    """Measure how fast this machine computes a model and loads its KV; workers, placement and simulations reckon with it."""
    from cli import profile as profiles
    from cli.demo_memory import with_demo_chunks
    from contracts.profile import encode
    from runtime.profiles import store

    flags = Flags(nodes=nodes, model=model, data=data, config=config, revision=revision)
    resolved = with_demo_chunks(resolve(flags), flags)
    if show:
        found = profiles.known(resolved)
    else:
        measured = profiles.measure(resolved, quick, quiet=as_json)
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(encode(measured))
        found = [(out or store(measured, resolved), measured)]
    for path, one in found:
        if as_json:
            print(encode(one), end="")
        else:
            profiles.show(_console(), one, path)


@commands.command(hidden=True)
def probe(address: Annotated[str, typer.Argument(help="http://host:port or grpc://host:port")]) -> int:
    """Exit with status 0 when the service at ADDRESS is healthy; what containers ask."""
    from cli.probe import healthy

    why = healthy(address)
    return _fail(why, 1) if why else 0


@commands.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(context: typer.Context) -> Any:
    """Replay a trace under several policies (`upbeat bench --help`), or compare targets (`upbeat bench compare --help`)."""
    from loadtest.cli import bench as replay
    from loadtest.compare.cli import compare

    program = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    if context.args[:1] == ["compare"]:
        program.command()(compare)
        return program(context.args[1:], prog_name="upbeat bench compare", standalone_mode=False)
    program.command(epilog="`upbeat bench compare A.yaml B.yaml` compares any targets; see `upbeat bench compare --help`.")(replay)
    return program(context.args, prog_name="upbeat bench", standalone_mode=False)


@commands.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def simulate(context: typer.Context) -> Any:
    """Simulate a fleet under several policies in virtual time, side by side; see `upbeat simulate --help`."""
    from loadtest.simulate.cli import run

    program = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    program.command()(run)
    return program(context.args, prog_name="upbeat simulate", standalone_mode=False)


commands.add_typer(keys.commands(lambda data: _print_json(data)))
commands.add_typer(workflows.commands(lambda: _console(), lambda data: _print_json(data)))


def _answer(data: Any, as_json: bool, text: str) -> None:
    if as_json:
        _print_json(data)
    else:
        _console().print(text)


@commands.command()
def completion(shell: Annotated[str, typer.Argument(metavar="bash|zsh|fish")]) -> None:
    """Print the script that completes commands, flags and session ids: `source <(upbeat completion bash)`."""
    print(script(shell))


def _console() -> Console:
    # A pipe has no width unless it is told one: whoever reads it wants one row a line.
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, markup=False, width=None if known else 1000)


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=2))


def _fail(message: str, status: int) -> int:
    print(f"upbeat: {message}", file=sys.stderr)
    return status
