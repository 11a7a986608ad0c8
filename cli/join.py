"""`upbeat join`: runs a further node of a running fleet, in the foreground: with our engine (cli/join_native.py), or
of a vLLM server that somebody started."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.core.plan import joining_plan
from cli.models import asked_models
from cli.operator import operator
from cli.options import number_option, whole_option
from cli.settings import Flags, Joining, join_run_dir, layout, make_directories
from contracts import identity
from contracts.errors import ConfigError
from runtime.config import Config
from runtime.config_file import changed, said_config
from runtime.metrics_page import read_metrics
from runtime.private import keep_private
from storelink.credentials import Credentials

_ASK_S = 10.0
_POLL_S = 0.5
#: What `upbeat join` says of a server that has no connector.
NO_CONNECTOR = (
    "this server has no connector: no session's KV is kept beyond its own memory, and erasing a session does not reach "
    "it. Start it again with the flags that `upbeat vllm-config --node {node}` prints"
)


def join(
    vllm: Annotated[
        str | None,
        typer.Option("--vllm", metavar="URL", help="The node of this vLLM server, such as http://127.0.0.1:8000."),
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="The fleet's schedulers, separated by commas.  [default: as configured]"
        ),
    ] = None,
    node: Annotated[
        int | None,
        whole_option("This node's number in the fleet.  [default: the first free one; vLLM: one more than configured]"),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="[NAME=]DIR|ID",
            help="As for `upbeat up`; with --vllm its name in the API.  [default: as configured; the server's first]",
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Where the fleet reaches this machine.  [default: 127.0.0.1]")
    ] = None,
    base_port: Annotated[
        int | None, whole_option("First of this node's ten ports.  [default: the first that are free]")
    ] = None,
    devices: Annotated[int | None, whole_option("As for `upbeat up`.")] = None,
    api_key_env: Annotated[
        str, typer.Option(metavar="NAME", help="The environment variable that holds the vLLM server's API key.")
    ] = "",
    no_store: Annotated[bool, typer.Option("--no-store", help="The vLLM node's store runs already.")] = False,
    data: Annotated[Path | None, typer.Option(help="A directory with the fleet's `secret`.  [default: data]")] = None,
    config: Annotated[Path | None, typer.Option(help="Configuration in YAML.")] = None,
    port: Annotated[int | None, whole_option("The gateway's port, from which other ports follow.")] = None,
    hbm_gib: Annotated[float | None, number_option("As for `upbeat up`.")] = None,
    dram_gib: Annotated[float | None, number_option("As for `upbeat up`.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Logs, locks, sockets.  [default: .cache/run-join-N]")] = None,
    bin_dir: Annotated[Path | None, typer.Option(hidden=True, help="Where the services' programs are.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print events as JSON, an object a line.")] = False,
) -> int:
    """Run one more node of a running fleet, until Ctrl-C or `upbeat leave`. With --vllm, of a server that was started
    with the flags of `upbeat vllm-config`."""
    programs = bin_dir or Path(sys.executable).parent
    schedulers = [part.strip() for part in scheduler.split(",")] if scheduler is not None else []
    flags = Flags(
        port=port,
        data=data,
        config=config,
        hbm_gib=hbm_gib,
        dram_gib=dram_gib,
        devices=devices,
        schedulers=schedulers,
        node_host=host,
    )
    wanted = Joining(flags, node, base_port, run_dir)
    if vllm is not None:
        for flag, value in (
            ("--host", host),
            ("--base-port", base_port),
            ("--devices", devices),
            ("--hbm-gib", hbm_gib),
        ):
            if value is not None:
                raise ConfigError(f"{flag} {value} is for nodes with our engine; leave it out, or leave out --vllm")
        server = _Server(vllm, model, api_key_env, store=not no_store)
        return _join_vllm(server, wanted, programs, as_json=as_json)
    if api_key_env or no_store:
        raise ConfigError("--api-key-env and --no-store are for vLLM servers; give --vllm URL, or leave them out")
    from cli.join_native import join_native

    one, several = asked_models([model] if model is not None else None)
    return join_native(replace(wanted, flags=replace(flags, model=one, models=several)), programs, as_json=as_json)


@dataclass(frozen=True, slots=True)
class _Server:
    """A vLLM server. model: its name in the API; None: the server's first. store: whether its node's store is started
    here."""

    url: str
    model: str | None
    api_key_env: str
    store: bool


def _join_vllm(server: _Server, wanted: Joining, programs: Path, *, as_json: bool) -> int:
    from cli import machine
    from cli.display import Display
    from cli.own_certificates import joined_certificates
    from cli.supervisor import Run, Supervisor
    from cli.up import check_programs
    from cli.written import write_configuration

    keep_private()
    vllm, file = server.url, wanted.flags.config
    count = said_config(file).nodes.count
    number = count if wanted.number is None else wanted.number
    run_dir = join_run_dir(file, wanted.run_dir, number)
    flags = replace(wanted.flags, nodes=max(count, number + 1), run_dir=run_dir)
    resolved = settings(layout(flags), vllm, server.model, server.api_key_env)
    if not (resolved.data / "secret").is_file():
        raise ConfigError(
            f"--data {resolved.data} has no file `secret`; give the fleet's data directory, or copy its `secret` "
            "there: without it, this node could read nothing that others have stored"
        )
    resolved = joined_certificates(resolved, number)
    plan = joining_plan(number, store=server.store)
    check_programs(programs, plan)
    make_directories(resolved, flags)
    display = Display(as_json=as_json)
    lock = machine.take_lock(resolved.run_dir / "lock", "--run-dir", vllm, display.line)
    if server.store:
        machine.remove_shared_memory(resolved)
        machine.check_ports(resolved, machine.ports_of_node(resolved, number))
    if not server.api_key_env:
        display.line(
            f"warning: {vllm} has no API key as far as is said (--api-key-env): whoever reaches it can use every "
            "tenant's sessions",
            "yellow",
        )
    write_configuration(resolved, (planned.program for planned in plan), os.environ)

    def announce(took_s: float) -> None:
        told = ", ".join(resolved.scheduler_addresses)
        display.line(
            f"node-{number} serves {resolved.served_model} from {vllm} and reports to {told} (ready in {took_s:.1f} s; "
            f"logs: {resolved.run_dir}/logs; stop: Ctrl-C)",
            "green",
        )
        if resolved.kv.cache and not _has_connector(resolved, number):
            display.line(f"warning: {NO_CONNECTOR.format(node=number)}", "yellow")

    run = Run(plan, lambda: _ready(resolved, number, store=server.store), announce)
    return asyncio.run(Supervisor(resolved, programs, display, [lock.fileno()], run).run())


def settings(config: Config, url: str, model: str | None, api_key_env: str) -> Config:
    """`config` for a node of the server at `url`. Asks the server for its model, unless `model` names it. Raises
    ConfigError."""
    over: dict[str, Any] = {"vllm": {"server": url.rstrip("/"), "api_key_env": api_key_env}}
    checked = changed(config, over)
    key = os.environ.get(api_key_env, "") if api_key_env else ""
    if api_key_env and not key:
        raise ConfigError(f"--api-key-env {api_key_env}: this variable is not set; set it to the server's API key")
    name, root = (model, model) if model is not None else served_by(checked.vllm.server, key)
    known = config.models.get(name)
    entry = {"path": root} if known is None else known.model_dump()
    return changed(config, over | {"models": {name: entry | {"engine": "vllm", "nodes": None, "min_nodes": 0}}})


def served_by(url: str, key: str) -> tuple[str, str]:
    """(name, directory or repository) of the first model that the server has. Raises ConfigError."""
    request = urllib.request.Request(f"{url}/v1/models", headers={"authorization": f"Bearer {key}"} if key else {})
    # No proxy of the environment: the server is on this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_ASK_S) as answer:
            first = json.loads(answer.read(1 << 20))["data"][0]
            return str(first["id"]), str(first.get("root") or first["id"])
    except urllib.error.HTTPError as e:
        remedy = "set --api-key-env to the variable that holds its API key" if e.code == 401 else "is it a vLLM server?"
        raise ConfigError(f"--vllm {url}: GET /v1/models answered {e.code}; {remedy}") from None
    except (OSError, ValueError) as e:
        reason = getattr(e, "reason", e)
        raise ConfigError(f"--vllm {url}: it cannot be asked ({reason}); start the server, or give --model") from None
    except (KeyError, IndexError, TypeError):
        raise ConfigError(f"--vllm {url}: GET /v1/models names no model; is it a vLLM server?") from None


async def _ready(config: Config, node: int, *, store: bool) -> tuple[int, str]:
    """200 when the node's processes are well; else 503 and which is not."""
    from cli.probe import healthy

    places, own = config.node(node), _own(config)
    asked = {"sidecar": places.devices[0].worker_address} | ({"store": places.store_address} if store else {})
    for name, address in asked.items():
        if await asyncio.to_thread(healthy, f"grpc://{address}", 2.0, identity.node(places.name), own):
            await asyncio.sleep(_POLL_S)
            waits = "the vLLM server does not serve yet" if name == "sidecar" else "its store does not answer yet"
            return 503, waits
    return 200, ""


def _has_connector(config: Config, node: int) -> bool:
    """As the sidecar found; true where it cannot be asked."""
    device = config.node(node).devices[0]
    host = device.worker_address.rpartition(":")[0]
    try:
        return "upbeat_sidecar_connector 0.0" not in read_metrics(host, device.metrics_port, _own(config), _ASK_S)
    except OSError:
        return True


def _own(config: Config) -> Credentials | None:
    return operator(config.tls.directory) if config.tls.directory else None
