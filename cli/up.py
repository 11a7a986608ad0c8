"""`upbeat up`: turns its flags into a configuration, checks the machine, and runs the stack."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from cli.core.plan import Planned, stack_plan
from cli.models import asked_models
from cli.options import Models, number_option, whole_option
from cli.settings import Flags, resolve
from contracts.errors import ConfigError
from runtime.config import Config
from runtime.config_file import cluster_secret
from runtime.private import keep_private
from runtime.vllm_checks import vllm_nodes
from runtime.vllm_places import missing_python, vllm_places


def up(
    nodes: Annotated[int | None, whole_option("Nodes to start: a kvstore and a worker each.  [default: 2]")] = None,
    devices: Annotated[
        int | None, whole_option("Devices a node: a worker each, all sharing one kvstore.  [default: 1]")
    ] = None,
    model: Models = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[MODEL:]NAME=DIR", help="A LoRA adapter, served as NAME; may be repeated.", show_default=False
        ),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of a hub id: a branch, a tag or a commit.  [default: main]")
    ] = None,
    port: Annotated[
        int | None, whole_option("The gateway's port; the stack's other ports follow from it.  [default: 8080]")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Where KV is kept.  [default: data]")] = None,
    config: Annotated[Path | None, typer.Option(help="Configuration in YAML.")] = None,
    cache: Annotated[str | None, typer.Option(metavar="on|off", help="Keep KV across requests.  [default: on]")] = None,
    hbm_gib: Annotated[
        float | None,
        number_option(
            "Device memory, a device: weights and KV.  [default: 1, or what the weights need; bundled model: little]"
        ),
    ] = None,
    dram_gib: Annotated[
        float | None, number_option("DRAM for KV, a node.  [default: 2; bundled model: little]")
    ] = None,
    policy: Annotated[
        str | None, typer.Option(metavar="NAME", help="Placement: balanced, sticky, ...  [default: balanced]")
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(help="Where the gateway listens; beyond this machine it has keys.  [default: 127.0.0.1]"),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(metavar="native|vllm", help="What runs the models: our engine, or vLLM servers.")
    ] = None,
    vllm_args: Annotated[
        str | None, typer.Option("--vllm-args", metavar="ARGS", help='Further arguments of vLLM, as in "--seed 1".')
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(metavar="ORIGIN", help="Pages of ORIGIN may call; may be repeated.")
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Logs, locks, pids.  [default: .cache/run, or .cache/run-PORT]")
    ] = None,
    bin_dir: Annotated[Path | None, typer.Option(hidden=True, help="Where the services' programs are.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print events as JSON, an object a line.")] = False,
) -> int:
    """Start a stack on this machine and keep it running until Ctrl-C."""
    from cli import machine
    from cli.addresses import base_url
    from cli.demo_memory import SMALL, with_demo_memory
    from cli.display import Display
    from cli.images import images_bytes, left_bytes
    from cli.own_certificates import with_own_certificates
    from cli.own_key import own_key_of
    from cli.supervisor import Run, Supervisor, ask_ready
    from cli.written import write_configuration

    keep_private()
    one, several = asked_models(model)
    flags = Flags(
        nodes,
        one,
        port,
        data,
        config,
        cache,
        hbm_gib,
        dram_gib,
        policy,
        run_dir,
        revision,
        host,
        cors_origin,
        several,
        devices,
        engine,
        vllm_args,
        adapters=adapter,
    )
    resolved, programs = with_demo_memory(asked := resolve(flags), flags), bin_dir or Path(sys.executable).parent
    plan = plan_of(resolved)
    check_programs(programs, plan)
    check_vllm_environment(resolved, plan)
    display = Display(as_json=as_json, own_key=own_key_of(resolved))
    # The services inherit both locks. If this launcher is killed, the next one waits until they have ended.
    locks = [
        machine.take_lock(resolved.data / "lock", "--data", base_url(resolved), display.line),
        machine.take_lock(resolved.run_dir / "lock", "--run-dir", base_url(resolved), display.line),
    ]
    machine.remove_shared_memory(resolved)
    machine.check_memory(resolved, images_bytes(resolved), left_bytes(resolved))
    machine.check_ports(resolved)
    machine.warn_of_disk(resolved, display.line)
    if resolved is not asked:
        display.line(SMALL.format(resolved.kv.hbm_gib * 1024, resolved.kv.dram_gib * 1024), "")
    cluster_secret(resolved.data)
    resolved = with_own_certificates(resolved)
    write_configuration(resolved, (planned.program for planned in plan), os.environ)
    run = Run(plan, lambda: ask_ready(resolved), lambda took_s: display.serving(resolved, took_s))
    return asyncio.run(Supervisor(resolved, programs, display, [lock.fileno() for lock in locks], run).run())


def plan_of(config: Config) -> list[Planned]:
    """The processes of a whole stack on this machine."""
    return stack_plan(
        config.nodes.count,
        len(config.scheduler_addresses),
        config.gateway.processes,
        config.nodes.devices,
        vllm_nodes(config),
        servers=not config.vllm.server,
    )


def check_programs(directory: Path, plan: Sequence[Planned]) -> None:
    """Raise ConfigError unless `directory` has every service's program."""
    install = f"install with `make up` in the checkout, or {sys.executable} -m pip install 'upbeat-server[serve]'"
    for program in sorted({planned.program for planned in plan}):
        if not os.access(directory / program, os.X_OK):
            raise ConfigError(f"{directory / program} is not there; {install}")


def check_vllm_environment(config: Config, plan: Sequence[Planned]) -> None:
    """Raise ConfigError when a vLLM server is to be started, and its environment or the room for its sockets is not
    there."""
    for planned in plan:
        if planned.program == "upbeat-vllm-server" and planned.node is not None:
            vllm_places(config, planned.node, planned.device)
            if not os.access(config.vllm.python, os.X_OK):
                raise ConfigError(missing_python(config.vllm.python))
