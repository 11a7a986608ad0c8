"""Checks across sections of the configuration: colliding addresses and ports, and settings that depend on each
other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from contracts.errors import ConfigError
from runtime.config import Config
from runtime.places import device_ports, node_ports
from runtime.registry import models_of, registered
from runtime.vllm_checks import check_vllm

LOOPBACK = {"127.0.0.1", "localhost", "::1"}


def needs_keys(host: str, api_keys: Sequence[object]) -> bool:
    """Whether a gateway on `host` would serve other machines without a key."""
    return not api_keys and host not in LOOPBACK


def check(config: Config) -> None:
    """Raises ConfigError for the first problem."""
    if needs_keys(config.gateway.host, config.gateway.api_keys):
        raise ConfigError(
            f"gateway.host = {config.gateway.host!r} listens beyond loopback without API keys; "
            "set gateway.api_keys, or gateway.host: 127.0.0.1"
        )
    if config.worker.load_links > config.nodes.devices:
        raise ConfigError(
            f"worker.load_links = {config.worker.load_links}: a node has nodes.devices = {config.nodes.devices}, and "
            "weights come through the links of a node's own devices only; lower it, or raise nodes.devices"
        )
    _check_same_ports(config)
    _check_schedulers(config)
    _check_models(config)
    _check_remap(config)
    ports = [("gateway.port", config.gateway.port)]
    if not config.scheduler.addresses:
        first = config.scheduler.port
        ports += [
            ("scheduler.port" if port == first else "scheduler.port with scheduler.count", port)
            for port in _scheduler_ports(config)
        ]
    nodes, devices = node_ports(config.nodes), device_ports(config.nodes)
    for key, port in ports:
        if port in nodes:
            raise ConfigError(
                f"{key} = {port} lies in the nodes' ports {nodes[0]} to {nodes[-1]}; change it or nodes.base_port"
            )
        if port in devices:
            raise ConfigError(
                f"{key} = {port} lies in the ports {devices[0]} to {devices[-1]} of the nodes' further devices "
                "(nodes.devices = "
                f"{config.nodes.devices}); change it or nodes.device_base_port"
            )
    if devices and devices[0] < nodes.stop and nodes[0] < devices.stop:
        raise ConfigError(
            f"nodes.device_base_port = {devices[0]}: the ports {devices[0]} to {devices[-1]} of the nodes' further "
            "devices overlap the "
            f"nodes' own, {nodes[0]} to {nodes[-1]}; give {nodes.stop} or more, or 0 for that"
        )
    if devices and devices[-1] > 65535:
        raise ConfigError(
            f"nodes.devices = {config.nodes.devices} with nodes.count = {config.nodes.count} needs ports up to "
            f"{devices[-1]}; "
            "lower either, nodes.base_port or nodes.device_base_port"
        )
    _check_internal(config)


def _check_same_ports(config: Config) -> None:
    nodes = config.nodes
    for key, host in (("store_host", nodes.store_host), ("worker_host", nodes.worker_host)):
        if nodes.same_ports and len(nodes.numbers) > 1 and "{n}" not in host:
            raise ConfigError(
                f"nodes.same_ports with nodes.{key} = {host!r}: {nodes.count} nodes would listen on the same ports of "
                f"one host; put {{n}} into nodes.{key}, or set nodes.same_ports: false"
            )


def _check_internal(config: Config) -> None:
    """Internal addresses beyond loopback need certificates: any neighbour could read and write KV otherwise."""
    if config.tls.directory is not None:
        return
    nodes, scheduler = config.nodes, config.scheduler
    schedulers = "scheduler.addresses" if scheduler.addresses else "scheduler.host"
    hosts = [
        ("nodes.listen_host", nodes.listen_host),
        ("nodes.store_host", nodes.store_host),
        ("nodes.worker_host", nodes.worker_host),
        ("scheduler.listen_host", scheduler.listen_host),
        *((schedulers, address.rpartition(":")[0].strip("[]")) for address in config.scheduler_addresses),
    ]
    for key, host in hosts:
        if host and host not in LOOPBACK:
            raise ConfigError(
                f"{key} = {host!r}: internal channels beyond loopback need certificates; make them with `upbeat certs "
                "init` and set tls.directory, or give 127.0.0.1"
            )


def _scheduler_ports(config: Config) -> range:
    return range(config.scheduler.port, config.scheduler.port + config.scheduler.count)


def _check_schedulers(config: Config) -> None:
    section = config.scheduler
    if section.addresses:
        if section.count not in (1, len(section.addresses)):
            raise ConfigError(
                f"scheduler.count = {section.count} does not fit {len(section.addresses)} scheduler.addresses; "
                "remove one of the two"
            )
        for address in section.addresses:
            if section.addresses.count(address) > 1:
                raise ConfigError(f"scheduler.addresses = {address!r} twice: name every scheduler once")
            if not 1 <= int(address.rpartition(":")[2]) <= 65535:
                raise ConfigError(f"scheduler.addresses = {address!r}: give a port from 1 to 65535")
    elif _scheduler_ports(config)[-1] > 65535:
        raise ConfigError(
            f"scheduler.count = {section.count} needs ports {section.port} to {_scheduler_ports(config)[-1]}; "
            "lower it or scheduler.port"
        )
    elif config.gateway.port in _scheduler_ports(config)[1:]:
        raise ConfigError(
            f"gateway.port = {config.gateway.port} lies in the schedulers' ports {section.port} to "
            f"{_scheduler_ports(config)[-1]}; "
            "change it, scheduler.port or scheduler.count"
        )


def _check_models(config: Config) -> None:
    count = config.nodes.count
    for name, model in config.models.items():
        numbers = model.nodes if model.nodes is not None else list(config.nodes.numbers)
        key = f"models.{name}.nodes"
        if config.nodes.joins is None and (beyond := [n for n in numbers if n >= count]):
            raise ConfigError(
                f"{key} = {numbers}: there is no node {beyond[0]}; give numbers from 0 to {count - 1}, or raise "
                "nodes.count"
            )
        if twice := [n for n, times in Counter(numbers).items() if times > 1]:
            raise ConfigError(f"{key} = {numbers}: node {twice[0]} is there twice; name each node once")
        if config.nodes.joins is None and model.min_nodes > len(numbers):
            raise ConfigError(
                f"models.{name}.min_nodes = {model.min_nodes}: {len(numbers)} of {count} nodes may serve it; "
                f"lower it, extend {key} or raise nodes.count"
            )
    _check_both_ways(config)
    _check_adapters(config)
    _check_those_that_stay(config)
    for number in config.nodes.numbers:
        if not models_of(config, number):
            first = next(iter(registered(config)))
            raise ConfigError(
                f"node {number} serves no model; add it to one, such as models.{first}.nodes: [..., {number}], or "
                "lower nodes.count"
            )
    check_vllm(config)


def _check_adapters(config: Config) -> None:
    """A name is one model's or one adapter's, and only models on Upbeat's engine have adapters."""
    owners: dict[str, str] = {}
    for name, model in registered(config).items():
        for adapter in model.adapters:
            key = f"models.{name}.adapters.{adapter}"
            if model.engine == "vllm":
                raise ConfigError(
                    f"{key}: adapters of a model that vLLM serves cannot be asked by name; remove it, or merge it into "
                    "its base and serve the merged model"
                )
            if adapter in registered(config):
                raise ConfigError(f"{key}: a model has this name; give the adapter another one")
            if adapter in owners:
                raise ConfigError(f"{key}: {owners[adapter]} has an adapter of this name; give one of them another one")
            owners[adapter] = f"models.{name}"


def _check_those_that_stay(config: Config) -> None:
    for number in config.nodes.numbers if config.sharing in ("swap", "serverless") else ():
        here = models_of(config, number)
        kept = [name for name in here if registered(config)[name].min_nodes and len(here) > 1]
        if kept and config.sharing == "serverless":
            raise ConfigError(
                f"models.{kept[0]}.min_nodes: with sharing: serverless an idle model leaves; remove it, or set "
                "sharing: prism"
            )
        if stays := [name for name in here if registered(config)[name].pinned and len(here) > 1]:
            raise ConfigError(
                f"models.{stays[0]}.pinned: with sharing: {config.sharing} the other models of node {number} would "
                "never run; remove it, or set sharing: prism"
            )


def _check_remap(config: Config) -> None:
    if config.worker.remap == "off":
        return
    if config.sharing != "prism":
        raise ConfigError(
            f"worker.remap = {config.worker.remap!r}: with sharing: {config.sharing} weights lend no memory; set "
            "worker.remap: off, or sharing: prism"
        )
    if all(model.engine == "vllm" for model in registered(config).values()):
        raise ConfigError(
            f"worker.remap = {config.worker.remap!r}: every model's engine is vllm, which keeps its weights; set "
            "worker.remap: off"
        )
    if config.worker.images_gib == 0:
        raise ConfigError(
            f"worker.remap = {config.worker.remap!r} with worker.images_gib = 0: layers that lend their memory are "
            "copied from images; raise that or leave it out, or set worker.remap: off"
        )


def _check_both_ways(config: Config) -> None:
    """`models`, and `model` with `model_name`, may both be set but must agree."""
    if not config.models:
        return
    said = config.models.get(config.model_name)
    if said is None or said.path != config.model:
        raise ConfigError(
            f"model = {str(config.model)!r}, model_name = {config.model_name!r}: models names "
            f"{', '.join(config.models)} as well; "
            "remove model and model_name, or move them to models.NAME.path"
        )
