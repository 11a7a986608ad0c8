"""What of a configuration can only be judged as a whole: addresses and ports that must not collide, and what must be set together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from contracts.errors import ConfigError
from runtime.places import device_ports, node_ports
from runtime.registry import check_models

if TYPE_CHECKING:
    from runtime.config import Config

LOOPBACK = {"127.0.0.1", "localhost", "::1"}


def needs_keys(host: str, api_keys: Sequence[object]) -> bool:
    """Whether a gateway that listens there would let others than this machine's programs call without a key."""
    return not api_keys and host not in LOOPBACK


def check(config: Config) -> None:
    """Raise ConfigError for the first wrong thing."""
    if needs_keys(config.gateway.host, config.gateway.api_keys):
        raise ConfigError(
            f"gateway.host = {config.gateway.host!r} listens beyond loopback without API keys; "
            "set gateway.api_keys, or gateway.host: 127.0.0.1"
        )
    _check_schedulers(config)
    check_models(config)
    ports = [("gateway.port", config.gateway.port)]
    if not config.scheduler.addresses:
        first = config.scheduler.port
        ports += [("scheduler.port" if port == first else "scheduler.port with scheduler.count", port) for port in _scheduler_ports(config)]
    nodes, devices = node_ports(config.nodes), device_ports(config.nodes)
    for key, port in ports:
        if port in nodes:
            raise ConfigError(f"{key} = {port} lies in the nodes' ports {nodes[0]} to {nodes[-1]}; change it or nodes.base_port")
        if port in devices:
            raise ConfigError(
                f"{key} = {port} lies in the ports {devices[0]} to {devices[-1]} of the nodes' further devices (nodes.devices = "
                f"{config.nodes.devices}); change it or nodes.device_base_port"
            )
    if devices and devices[0] < nodes.stop and nodes[0] < devices.stop:
        raise ConfigError(
            f"nodes.device_base_port = {devices[0]}: the ports {devices[0]} to {devices[-1]} of the nodes' further devices overlap the "
            f"nodes' own, {nodes[0]} to {nodes[-1]}; give {nodes.stop} or more, or 0 for that"
        )
    if devices and devices[-1] > 65535:
        raise ConfigError(
            f"nodes.devices = {config.nodes.devices} with nodes.count = {config.nodes.count} needs ports up to {devices[-1]}; "
            "lower either, nodes.base_port or nodes.device_base_port"
        )


def _scheduler_ports(config: Config) -> range:
    return range(config.scheduler.port, config.scheduler.port + config.scheduler.count)


def _check_schedulers(config: Config) -> None:
    section = config.scheduler
    if section.addresses:
        if section.count not in (1, len(section.addresses)):
            raise ConfigError(
                f"scheduler.count = {section.count} does not fit {len(section.addresses)} scheduler.addresses; remove one of the two"
            )
        for address in section.addresses:
            if section.addresses.count(address) > 1:
                raise ConfigError(f"scheduler.addresses = {address!r} twice: name every scheduler once")
            if not 1 <= int(address.rpartition(":")[2]) <= 65535:
                raise ConfigError(f"scheduler.addresses = {address!r}: give a port from 1 to 65535")
    elif _scheduler_ports(config)[-1] > 65535:
        raise ConfigError(
            f"scheduler.count = {section.count} needs ports {section.port} to {_scheduler_ports(config)[-1]}; lower it or scheduler.port"
        )
    elif config.gateway.port in _scheduler_ports(config)[1:]:
        raise ConfigError(
            f"gateway.port = {config.gateway.port} lies in the schedulers' ports {section.port} to {_scheduler_ports(config)[-1]}; "
            "change it, scheduler.port or scheduler.count"
        )
