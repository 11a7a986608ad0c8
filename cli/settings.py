"""The configuration of `upbeat up`: flags over environment over file over defaults.

Ports follow from the gateway's port P unless configured: scheduler P + 1, nodes from P + 20, then further devices
(runtime/places.py). An error names the wrong flag, its value and a remedy.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from cli.adapters import adapters_bytes, check_adapters, with_adapters
from cli.machine import on_host
from cli.models import flag_of, models_over
from cli.own_key import fresh_key, kept_key
from contracts.devices import MOST_DEVICES
from contracts.errors import ConfigError
from contracts.kv import DTYPE_BYTES
from runtime.config import Config
from runtime.config_checks import needs_keys
from runtime.config_file import changed, load_config, said_config, says
from runtime.gateway_config import ORIGIN
from runtime.model_config import load_config as load_model_config
from runtime.model_directory import check_foreign_directory, floating_bytes, model_directory, named, weight_bytes
from runtime.model_names import hub_id
from runtime.places import PORTS_A_DEVICE, PORTS_A_NODE
from runtime.registered_model import RegisteredModel
from runtime.registry import models_of, registered, weights_stay
from runtime.sections import GIB
from runtime.vllm_checks import vllm_models

DEFAULT_PORT = 8080
#: From the gateway's port to the first node's.
NODES_OFFSET = 20
_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
POLICIES = ("balanced", "sticky", "cache-aware", "random", "round-robin")
#: Device memory beside the weights when no size is configured.
KV_BESIDE_GIB = 1.0
BUNDLED_MODEL = Path(__file__).parent.parent / "models" / "demo"


@dataclass(frozen=True, slots=True)
class Flags:
    """The flags of `upbeat up`; None: not given."""

    nodes: int | None = None
    model: str | None = None
    port: int | None = None
    data: Path | None = None
    config: Path | None = None
    cache: str | None = None
    hbm_gib: float | None = None
    dram_gib: float | None = None
    policy: str | None = None
    run_dir: Path | None = None
    revision: str | None = None
    host: str | None = None
    #: In addition to the configured ones.
    cors_origins: Sequence[str] | None = None
    #: Several models by name; `model` is then None.
    models: Mapping[str, str] = field(default_factory=dict)
    #: Devices a node.
    devices: int | None = None
    #: Of all models; None: as the file says, else our own.
    engine: str | None = None
    #: Further arguments of every vLLM server, as a shell would split them.
    vllm_args: str | None = None
    #: The number of the one node that joins a fleet, where others reach it, and its first port.
    joins: int | None = None
    node_host: str | None = None
    base_port: int | None = None
    #: Of the fleet's schedulers.
    schedulers: Sequence[str] = ()
    #: `[MODEL:]NAME=DIR`, in addition to the configured ones.
    adapters: Sequence[str] | None = None


def resolve(flags: Flags) -> Config:
    """The configuration of a stack to start. Makes its directories, and downloads hub models that are not cached.
    Raises ConfigError."""
    config = layout(flags, kept_key)
    make_directories(config, flags)
    return _with_model(config, flags)


def make_directories(config: Config, flags: Flags) -> None:
    """Make the directories of data and logs. Raises ConfigError."""
    _check_directory("--data" if flags.data else "data =", config.data)
    _check_directory("--run-dir" if flags.run_dir else "run_dir =", config.run_dir)


def layout(flags: Flags, own_key: Callable[[Path], str] | None = None) -> Config:
    """The configuration from flags, environment and file; changes nothing on disk. Raises ConfigError naming the wrong
    flag or key.

    own_key: makes the key of a stack that would listen beyond loopback without one, from its data directory; None: a
    random key that is not stored.
    """
    _check_values(flags)
    said = said_config(flags.config)
    port = flags.port or said.gateway.port
    nodes, devices = flags.nodes or said.nodes.count, flags.devices or said.nodes.devices
    over: dict[str, Any] = {
        "gateway": {"port": port},
        "nodes": {"count": nodes, "devices": devices},
        "scheduler": {},
        "kv": {},
    }
    if not says(flags.config, "scheduler", "port"):
        over["scheduler"]["port"] = port + 1
    if not says(flags.config, "nodes", "base_port"):
        behind = 0 if said.nodes.device_base_port else PORTS_A_DEVICE * (devices - 1) * nodes
        last = port + NODES_OFFSET + PORTS_A_NODE * nodes + behind - 1
        if last > 65_535:
            flag = f"--port {port}" if flags.port else f"gateway.port = {port}"
            raise ConfigError(
                f"{flag}: {nodes} nodes{f' of {devices} devices' if devices > 1 else ''} need ports up to {last}; "
                f"give one of at most {65_535 - last + port}"
            )
        over["nodes"]["base_port"] = port + NODES_OFFSET
    over["nodes"] |= _of_joined(flags)
    if flags.schedulers:
        over["scheduler"] = {"addresses": list(flags.schedulers), "count": 1}
    if flags.run_dir is not None:
        over["run_dir"] = flags.run_dir
    elif "run_dir" not in said.model_fields_set:
        over["run_dir"] = Path(".cache") / ("run" if port == DEFAULT_PORT else f"run-{port}")
    over |= _models_asked(flags, said, nodes if flags.joins is None else 1)
    if flags.vllm_args is not None:
        over["vllm"] = {"args": [*said.vllm.args, *_words(flags.vllm_args)]}
    if flags.data is not None:
        over["data"] = flags.data
    if flags.host is not None:
        over["gateway"]["host"] = flags.host
    if flags.cors_origins:
        over["gateway"]["cors_origins"] = list(dict.fromkeys([*said.gateway.cors_origins, *flags.cors_origins]))
    if needs_keys(flags.host or said.gateway.host, said.gateway.api_keys):
        key = own_key(flags.data or said.data) if own_key is not None else fresh_key()
        over["gateway"]["api_keys"] = [{"key": key}]
    if flags.cache is not None:
        over["kv"]["cache"] = flags.cache == "on"
    if flags.hbm_gib is not None:
        over["kv"]["hbm_gib"] = flags.hbm_gib
    if flags.dram_gib is not None:
        over["kv"]["dram_gib"] = flags.dram_gib
    if flags.policy is not None:
        over["scheduler"]["policy"] = flags.policy
    config = with_adapters(load_config(flags.config, over), flags.adapters)
    if flags.vllm_args is not None and not vllm_models(config):
        raise ConfigError(f"--vllm-args {flags.vllm_args}: no model runs in vLLM; give --engine vllm as well")
    return config


def _models_asked(flags: Flags, said: Config, nodes: int) -> dict[str, Any]:
    """The keys `models` or `model`, as far as flags change them. Raises ConfigError."""
    models = {} if flags.model is not None else models_over(flags.models, said, nodes)
    if models and flags.revision is not None:
        raise ConfigError(
            f"--revision {flags.revision}: there are several models; write it behind an id, as in "
            "NAME=owner/name@revision"
        )
    found: dict[str, Any] = {"models": models} if models or said.models else {}
    if models:
        return {
            "models": {name: m | {"engine": flags.engine or m.get("engine", "native")} for name, m in models.items()}
        }
    one: str | Path | None = None
    if flags.model is not None:
        one = named(flags.model, flags.revision)
    elif flags.revision is not None:
        one = named(str(said.model), flags.revision)
    elif "model" not in said.model_fields_set and not said.model.is_dir():
        one = BUNDLED_MODEL
    if flags.engine == "vllm":
        text = str(said.model if one is None else one)
        asked = hub_id(text)
        name = said.model_name or (f"upbeat-{Path(text).name}" if asked is None else asked.repo)
        return {"models": {name: {"path": text, "engine": "vllm"}}}
    return found if one is None else found | {"model": one}


def _of_joined(flags: Flags) -> dict[str, Any]:
    """The keys of `nodes` for a node that joins a fleet."""
    if flags.joins is None:
        return {}
    over: dict[str, Any] = {"joins": flags.joins}
    if flags.base_port is not None:
        over["base_port"] = flags.base_port
    if flags.node_host is not None:
        over |= {"store_host": flags.node_host, "worker_host": flags.node_host}
    return over


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as e:
        raise ConfigError(f"--vllm-args {text}: {e}; quote it as for a shell") from None


@dataclass(frozen=True, slots=True)
class Joining:
    """The node that the flags of `upbeat join` ask for. number, base_port, run_dir: None: to be chosen."""

    flags: Flags
    number: int | None
    base_port: int | None
    run_dir: Path | None

    def __post_init__(self) -> None:
        if self.number is not None and not 0 <= self.number <= 999:
            raise ConfigError(f"--node {self.number} is out of range; give a number from 0 to 999")


def join_run_dir(config: Path | None, run_dir: Path | None, node: int) -> Path:
    """Where `upbeat join` keeps logs and sockets of node `node`, by its flags --config and --run-dir. Raises
    ConfigError."""
    said = said_config(config)
    return run_dir or (
        said.run_dir / f"join-{node}" if "run_dir" in said.model_fields_set else Path(".cache") / f"run-join-{node}"
    )


def policies() -> tuple[str, ...]:
    """Names of placement policies: built in, then those of installed plugins (docs/placement.md)."""
    return POLICIES + tuple(sorted({e.name for e in entry_points(group="upbeat.placement_policies")} - set(POLICIES)))


def _check_values(flags: Flags) -> None:
    for name, value, low, high in (
        ("--nodes", flags.nodes, 1, 256),
        ("--devices", flags.devices, 1, MOST_DEVICES),
        ("--port", flags.port, 1, 65_535),
    ):
        if value is not None and not low <= value <= high:
            raise ConfigError(f"{name} {value} is out of range; give a number from {low} to {high}")
    if flags.host is not None and not _is_host(flags.host):
        raise ConfigError(
            f"--host {flags.host} is no address to listen on; give one of this machine's, such as 127.0.0.1, "
            "0.0.0.0 or ::"
        )
    for origin in flags.cors_origins or ():
        if not ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"--cors-origin {origin} is no origin; give scheme, host and port without a path, such as "
                "http://localhost:3000, or *"
            )
    for name, gib in (("--hbm-gib", flags.hbm_gib), ("--dram-gib", flags.dram_gib)):
        if gib is not None and not (math.isfinite(gib) and gib > 0):
            raise ConfigError(f"{name} {gib} is not an amount of memory; give GiB above 0, such as {name} 1")
    for name, word, allowed in (
        ("--cache", flags.cache, ("on", "off")),
        ("--engine", flags.engine, ("native", "vllm")),
        ("--policy", flags.policy, policies()),
    ):
        if word is not None and word not in allowed:
            raise ConfigError(f"{name} {word} is unknown; give {', '.join(allowed[:-1])} or {allowed[-1]}")


def _is_host(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(text))
    return _NAME.fullmatch(text) is not None


def _with_model(config: Config, flags: Flags) -> Config:
    """`config` with its models' directories (downloads hub ids) and names, and enough HBM for the weights by default.
    Raises ConfigError."""
    over: dict[str, Any] = {}
    if config.models:
        found = {name: _place_of(name, m, flags) for name, m in config.models.items()}
        over["models"] = {name: m.model_dump() | {"path": found[name]} for name, m in config.models.items()}
    else:
        asked = hub_id(str(config.model))
        found = {
            config.served_model: model_directory(str(config.model), "--model" if flags.model is not None else "model =")
        }
        over["model"] = found[config.served_model]
        if asked is not None and not config.model_name:
            over["model_name"] = asked.repo
    needs = {name: weights_gib(config, name, directory) for name, directory in found.items()}
    fullest = max(
        (models_of(config, number) for number in config.nodes.numbers),
        key=lambda names: sum(needs[n] for n in names),
    )
    need, asked_for = (
        sum(needs[name] for name in fullest),
        " and ".join(str(registered(config)[name].path) for name in fullest),
    )
    if says(flags.config, "kv", "hbm_gib") or flags.hbm_gib is not None:
        if not weights_stay(config) and fullest:  # weights come and go: each model alone has to fit
            largest = max(fullest, key=lambda name: needs[name])
            need, asked_for = needs[largest], str(registered(config)[largest].path)
        if need >= config.kv.hbm_gib:
            raise ConfigError(
                f"--hbm-gib {config.kv.hbm_gib:g}: the weights of {asked_for} alone need {need:.2f} GiB, and KV "
                f"needs room beside them; give --hbm-gib {math.ceil(need + KV_BESIDE_GIB)}"
            )
    elif need > config.kv.hbm_gib - KV_BESIDE_GIB / 2:
        over["kv"] = {"hbm_gib": float(math.ceil(need + KV_BESIDE_GIB))}
    return changed(config, over)


def _place_of(name: str, model: RegisteredModel, flags: Flags) -> Path:
    """The model's directory; for a hub id that vLLM runs, the id: vLLM downloads it. Raises ConfigError."""
    flag = flag_of(name, model, flags.models)
    if model.engine != "vllm":
        directory = model_directory(str(model.path), flag)
        check_adapters(name, model, directory)
        return directory
    if hub_id(str(model.path)) is None:
        check_foreign_directory(model.path, flag)
    return model.path


def weights_gib(config: Config, name: str, directory: Path) -> float:
    """GiB of `kv.hbm_gib` that the weights take, as far as they are here. vLLM measures a GPU's memory itself."""
    if registered(config)[name].engine == "vllm":
        return weight_bytes(directory) / GIB if directory.is_dir() and on_host(config) else 0.0
    beside, whole = adapters_bytes(config, name, directory), weight_bytes(directory)
    growth = _growth(config, name, directory)
    if growth != 1.0 and load_model_config(directory).quantisation is not None:  # codes stay as they are
        return (whole + (growth - 1.0) * floating_bytes(directory) + beside) / GIB
    return (whole * growth + beside) / GIB


def _growth(config: Config, name: str, directory: Path) -> float:
    """Bytes in memory per byte in the file, by the type that the weights are served in."""
    stored, own = load_model_config(directory).dtype, registered(config)[name].dtype
    served = config.worker.dtype if own == "auto" else own
    return 1.0 if served == "auto" or stored is None else DTYPE_BYTES[served] / DTYPE_BYTES[stored]


def _check_directory(flag: str, path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(
            f"{flag} {path}: it cannot be made ({e.strerror}); give a directory that can be written"
        ) from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"{flag} {path}: it cannot be written; change its rights or give another directory")
