"""`upbeat join` without a vLLM server: a further node with our engine. Its number and its ports need no file: the fleet
is asked for a free number, and the node tells the fleet its addresses."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

from cli.core.plan import native_plan
from cli.schedulers import fleet_of, operator_of
from cli.settings import Flags, Joining, join_run_dir, layout, make_directories, resolve
from contracts import identity
from contracts.devices import node_of
from contracts.errors import ConfigError
from contracts.identity import Role, identity_of
from contracts.v1 import scheduler_pb2
from runtime.config import Config
from runtime.config_checks import LOOPBACK
from runtime.config_file import changed
from runtime.places import PORTS_A_NODE
from runtime.private import keep_private
from runtime.registry import registered
from storelink.credentials import CERTIFICATE

#: Blocks of ports that are tried.
_BLOCKS = 100
_POLL_S = 0.5


def join_native(wanted: Joining, programs: Path, *, as_json: bool) -> int:
    """Run the node until it is stopped or has left; the exit status. Raises ConfigError."""
    from cli import machine
    from cli.demo_memory import with_demo_memory
    from cli.display import Display
    from cli.images import images_bytes, left_bytes
    from cli.own_certificates import joined_certificates
    from cli.supervisor import Run, Supervisor
    from cli.up import check_programs, check_vllm_environment
    from cli.written import write_configuration

    keep_private()
    first = replace(wanted.flags, joins=wanted.number or 0)
    fleet = layout(replace(first, run_dir=join_run_dir(first.config, wanted.run_dir, wanted.number or 0)))
    secret = fleet.data / "secret"
    if not secret.is_file():
        raise ConfigError(
            f"--data {fleet.data} has no file `secret`; give the fleet's data directory, or copy its `secret` "
            "there: without it, this node could read nothing that others have stored"
        )
    seen = fleet_of(fleet.scheduler_addresses, operator_of(fleet))
    number = number_of(fleet, seen) if wanted.number is None else wanted.number
    if seen is not None and any(node_of(n.node) == f"node-{number}" and n.serving for n in seen.nodes):
        raise ConfigError(f"--node {number}: node-{number} serves already; give another number, or leave --node out")
    flags = replace(first, joins=number, run_dir=join_run_dir(first.config, wanted.run_dir, number))
    flags = replace(flags, base_port=wanted.base_port or free_ports(flags, number))
    resolved = with_demo_memory(resolve(flags), flags)
    resolved = _with_threads(joined_certificates(resolved, number), seen)
    plan = native_plan(number, resolved.nodes.devices)
    check_programs(programs, plan)
    check_vllm_environment(resolved, plan)
    make_directories(resolved, flags)
    display = Display(as_json=as_json)
    lock = machine.take_lock(resolved.run_dir / "lock", "--run-dir", f"node-{number}", display.line)
    machine.remove_shared_memory(resolved)
    machine.check_memory(resolved, images_bytes(resolved), left_bytes(resolved))
    machine.check_ports(resolved, machine.ports_of_node(resolved, number))
    write_configuration(resolved, (planned.program for planned in plan), os.environ)

    def announce(took_s: float) -> None:
        told, models = ", ".join(resolved.scheduler_addresses), " and ".join(registered(resolved))
        display.line(
            f"node-{number} serves {models} and reports to {told} (ready in {took_s:.1f} s; logs: "
            f"{resolved.run_dir}/logs; stop: Ctrl-C; leave the fleet: upbeat leave node-{number})",
            "green",
        )

    run = Run(plan, lambda: _ready(resolved, number), announce)
    return asyncio.run(Supervisor(resolved, programs, display, [lock.fileno()], run).run())


def number_of(config: Config, seen: scheduler_pb2.Fleet | None) -> int:
    """The node's number: of its certificate, if `tls.directory` is that of one node, else the first that no member of
    the fleet has. Raises ConfigError."""
    said = _certified(config)
    if said is not None:
        return said
    if seen is None:
        raise ConfigError(
            f"no scheduler at {', '.join(config.scheduler_addresses)} names the fleet's nodes to this command; give "
            "--scheduler HOST:PORT, and tls.directory with an operator's certificate, or --node"
        )
    taken = {*seen.members, *(node_of(n.node) for n in seen.nodes)}
    return next(n for n in range(len(taken) + 1) if f"node-{n}" not in taken)


def _certified(config: Config) -> int | None:
    file = config.tls.directory / CERTIFICATE if config.tls.directory is not None else None
    if file is None or not file.exists():
        return None
    from cryptography import x509

    try:
        found = x509.load_pem_x509_certificate(file.read_bytes())
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound):
        return None
    who = identity_of(names.get_values_for_type(x509.DNSName))
    if who is None or who.role is not Role.NODE or not who.name.removeprefix("node-").isdecimal():
        raise ConfigError(f"{file} is the certificate of {who or 'nobody'}; a node needs its own, such as node-2's")
    return int(who.name.removeprefix("node-"))


def free_ports(flags: Flags, number: int) -> int:
    """The first block of ports that is free here, from where the fleet's own would be. Raises ConfigError."""
    from cli import machine

    begin = layout(replace(flags, base_port=None)).nodes.base_port + PORTS_A_NODE * number
    for base in range(begin, min(begin + PORTS_A_NODE * _BLOCKS, 65_000), PORTS_A_NODE):
        config = layout(replace(flags, base_port=base))
        if not any(use.taken_by for use in machine.ports_of_node(config, number)):
            return base
    raise ConfigError(f"no {PORTS_A_NODE} free ports from {begin} on; give --base-port")


def _with_threads(config: Config, seen: scheduler_pb2.Fleet | None) -> Config:
    """A share of the cores for each worker, where the fleet is on this machine."""
    here = all(address.rpartition(":")[0] in LOOPBACK for address in config.scheduler_addresses)
    if config.worker.threads or seen is None or not here:
        return config
    cores = len(os.sched_getaffinity(0))
    return changed(config, {"worker": {"threads": max(1, cores // (len(seen.nodes) + config.nodes.devices))}})


async def _ready(config: Config, number: int) -> tuple[int, str]:
    """200 when the node's processes are well and the fleet sees them serve; else 503 and what is missing."""
    from cli.probe import healthy

    places, own = config.node(number), operator_of(config)
    asked = {device.name: device.worker_address for device in places.devices} | {"its store": places.store_address}
    for name, address in asked.items():
        if await asyncio.to_thread(healthy, f"grpc://{address}", 2.0, identity.node(places.name), own):
            await asyncio.sleep(_POLL_S)
            return 503, f"{name} does not answer yet"
    seen = await asyncio.to_thread(fleet_of, config.scheduler_addresses, own)
    serving = {n.node for n in seen.nodes if n.serving} if seen is not None else set()
    if seen is not None and not {device.name for device in places.devices} <= serving:
        await asyncio.sleep(_POLL_S)
        return 503, f"the fleet does not see {places.name} serve yet"
    return 200, ""
