"""Checks of this machine: each gives findings with a level, and a remedy if something is wrong."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
from rich.console import Console

from cli import machine
from cli.adapters import check_adapters
from cli.images import images_bytes, left_bytes
from contracts import identity
from contracts.errors import ConfigError
from runtime import gpus
from runtime.config import Config
from runtime.config_checks import LOOPBACK
from runtime.model_directory import check_directory, check_foreign_directory
from runtime.model_names import hub_id
from runtime.own_certificate import checked, place_of
from runtime.registered_model import RegisteredModel
from runtime.registry import load_links, registered
from runtime.sections import GIB
from runtime.vllm_places import missing_python
from storelink.credentials import CERTIFICATE

#: Below this a session's KV soon fills the disk.
DISK_WANTED_BYTES = 5 * GIB
NIXL_TIMEOUT_S = 60.0
#: A certificate that is valid for less than this is worth a warning.
EXPIRES_SOON = datetime.timedelta(days=14)
BUILD_TIMEOUT_S = 600.0
#: Enough for a large model on a slow disk.
WEIGHTS_TIMEOUT_S = 3600.0
#: Required packages, by distribution name.
NEEDED = (
    "aiohttp",
    "grpcio",
    "protobuf",
    "msgpack",
    "blake3",
    "torch",
    "tokenizers",
    "safetensors",
    "obstore",
    "xxhash",
    "huggingface_hub",
)

#: Works as printed, in any environment.
PIP = f"{sys.executable} -m pip install"
INSTALL = f"run `make up` in the checkout, or {PIP} 'upbeat-server[serve]'"


@dataclass(frozen=True, slots=True)
class Finding:
    """One result. warn: a stack starts, but lacks something; fail: it does not start."""

    check: str
    level: Literal["ok", "warn", "fail"]
    detail: str
    remedy: str = ""


def examine(config: Config) -> list[Finding]:
    """All findings for this configuration. Queries the hub for models given by hub id.

    Runs child processes that import NIXL, build the CPU kernels (once), and read each model's weights.
    """
    models = [
        _vllm_model(config, model.path) if model.engine == "vllm" else _model(model.path)
        for model in registered(config).values()
    ]
    here = {
        name: model.model_copy(update={"path": directory or model.path})
        for (name, model), (_, directory) in zip(config.models.items(), models, strict=False)
    }
    config = config.model_copy(update={"models": here})
    configs = [config.model_copy(update={"model": directory}) for _, directory in models if directory is not None]
    checks = (_python, _packages, _ports, _certificates, _shared_memory, _memory, _disk, _nixl, _device, _kernels)
    findings = [finding for check in checks for finding in check(config)]
    findings += [finding for one in configs for finding in _weights(one)]
    for (name, model), (_, directory) in zip(registered(config).items(), models, strict=True):
        findings += _adapters(name, model, directory) if directory is not None else []
    return [*findings, *_listening(config), *(finding for found, _ in models for finding in found)]


def _model(path: Path) -> tuple[list[Finding], Path | None]:
    """Findings for one model, and its directory if it is on this machine. Downloads no weights."""
    asked = hub_id(str(path))
    try:
        if asked is None:
            check_directory(path, "model")
            return [Finding("model", "ok", f"{path}: it can be served")], path
        from runtime import hub

        said: list[str] = []
        found = hub.look_up(asked, "model", said.append)
        if isinstance(found, Path) or found.is_here:
            directory = found if isinstance(found, Path) else found.directory
            return [
                Finding("model", "ok", "; ".join([f"{asked}: it can be served, from {directory}", *said]))
            ], directory
        hub.check_room(found, "model")
    except ConfigError as e:
        what, _, remedy = str(e).rpartition("; ")
        return [Finding("model", "fail", what, remedy)], None
    missing = f"{found.missing_bytes / GIB:.2f} GiB of its weights are not here yet"
    return [Finding("model", "ok", f"{asked}: it can be served; {missing}: `upbeat up` downloads them")], None


def _adapters(name: str, model: RegisteredModel, directory: Path) -> list[Finding]:
    """A finding for the adapters of the model in `directory`, if it has some."""
    try:
        check_adapters(name, model, directory)
    except ConfigError as e:
        what, _, remedy = str(e).rpartition("; ")
        return [Finding("adapters", "fail", what, remedy)]
    return [Finding("adapters", "ok", f"of {name}: {', '.join(model.adapters)}")] if model.adapters else []


def _vllm_model(config: Config, path: Path) -> tuple[list[Finding], None]:
    """Findings for a model that vLLM runs."""
    found: list[Finding] = []
    if hub_id(str(path)) is not None:
        found.append(Finding("model", "ok", f"{path}: vLLM downloads it"))
    else:
        try:
            check_foreign_directory(path, "model")
            found.append(Finding("model", "ok", f"{path}: vLLM says whether it can be served"))
        except ConfigError as e:
            what, _, remedy = str(e).rpartition("; ")
            found.append(Finding("model", "fail", what, remedy))
    if config.vllm.server:
        found.append(Finding("vllm", "ok", f"its servers are started elsewhere: {config.vllm.server}"))
    elif os.access(config.vllm.python, os.X_OK):
        found.append(Finding("vllm", "ok", f"{config.vllm.python}"))
    else:
        what, _, remedy = missing_python(config.vllm.python).partition("; ")
        found.append(Finding("vllm", "fail", what, remedy))
    return found, None


def show(console: Console, findings: Sequence[Finding]) -> None:
    """Print the findings, wrapped to the console's width."""
    for f in findings:
        style = {"ok": "green", "warn": "yellow", "fail": "bold red"}[f.level]
        line = f"{f.level:<5}{f.check:<14} {f.detail}{f.remedy and '; ' + f.remedy}"
        # Paths longer than a line are not broken.
        console.print(
            textwrap.fill(
                line, console.width, subsequent_indent=" " * 20, break_long_words=False, break_on_hyphens=False
            ),
            style=style,
        )


def _python(config: Config) -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    good = sys.version_info >= (3, 11)
    yield Finding("python", "ok" if good else "fail", version, "" if good else "install Python 3.11 or newer")


def _packages(config: Config) -> Iterator[Finding]:
    for name in NEEDED:
        try:
            yield Finding(name, "ok", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "fail", "not installed", INSTALL)


def _ports(config: Config) -> Iterator[Finding]:
    uses = machine.ports_of(config)
    taken = [use for use in uses if use.taken_by]
    low, high = min(use.port for use in uses), max(use.port for use in uses)
    if not taken:
        yield Finding("ports", "ok", f"{len(uses)} ports between {low} and {high} are free")
    elif all("upbeat" in use.taken_by for use in taken):
        yield Finding(
            "ports", "warn", f"{len(taken)} are in use by a running stack", "stop it before another one starts here"
        )
    else:
        named = ", ".join(f"{use.port} ({use.purpose}) by {use.taken_by}" for use in taken)
        yield Finding("ports", "fail", f"taken: {named}", "stop that, or give another --port")


def _certificates(config: Config) -> Iterator[Finding]:
    """Of each process that a stack here has."""
    directory = config.tls.directory
    if directory is None:
        if config.tls.automatic:
            yield Finding("certificates", "ok", f"`upbeat up` makes them, in {config.own_certificates}")
        return
    names = (config.node(n).name for n in range(config.nodes.count))
    for who in (identity.GATEWAY, identity.SCHEDULER, *map(identity.node, names)):
        try:
            until = checked(place_of(directory, who) / CERTIFICATE, who)
        except ConfigError as e:
            detail, _, remedy = str(e).rpartition("; ")
            yield Finding("certificate", "fail", detail, remedy)
            continue
        soon = until - datetime.datetime.now(datetime.UTC) < EXPIRES_SOON
        remedy = "`upbeat certs renew` makes new ones, which running processes take by themselves" if soon else ""
        yield Finding("certificate", "warn" if soon else "ok", f"{who}: valid until {until:%Y-%m-%d %H:%M} UTC", remedy)


def _shared_memory(config: Config) -> Iterator[Finding]:
    try:
        need, have = machine.shared_memory_bytes(config)
    except ConfigError as e:
        yield Finding("shared memory", "fail", str(e))
        return
    images, have = images_bytes(config), have + left_bytes(config)
    of_images = f", {images / GIB:.1f} of them for images of weights (worker.images_gib)" if images else ""
    detail = f"{config.shm_dir}: {have / GIB:.1f} GiB free, {(need + images) / GIB:.1f} GiB needed{of_images}"
    less = "lower --dram-gib or --nodes" if have < need else "lower worker.images_gib or --dram-gib"
    good = have >= need + images
    yield Finding("shared memory", "ok" if good else "fail", detail, "" if good else less)


def _memory(config: Config) -> Iterator[Finding]:
    need, have = machine.memory_bytes(config)
    try:
        images = images_bytes(config)
    except ConfigError:  # said by `_shared_memory`
        images = 0
    need, free = need + images, psutil.virtual_memory().available
    what = f"HBM{machine.each(config)} and DRAM of all nodes" + (" and images of weights" if images else "")
    detail = f"{have / GIB:.1f} GiB, {free / GIB:.1f} GiB available; {what} take {need / GIB:.1f} GiB"
    level: Literal["ok", "warn", "fail"] = "ok" if need <= free else "warn" if need <= have else "fail"
    yield Finding("memory", level, detail, "" if level == "ok" else _less(config, images=images > 0))


def _less(config: Config, *, images: bool) -> str:
    others = (", worker.images_gib" if images else "") + (", --devices" if config.nodes.devices > 1 else "")
    return f"lower --hbm-gib, --dram-gib{others} or --nodes"


def _disk(config: Config) -> Iterator[Finding]:
    try:
        room = machine.disk_room(config)
    except OSError as e:
        yield Finding("disk", "warn", f"{config.data}: {e.strerror}", "give another --data: no KV is kept there")
        return
    good = room.free >= DISK_WANTED_BYTES
    yield Finding("disk", "ok" if good else "warn", f"{config.data}: {room}", "" if good else "give another --data")
    for place in room.scarce:
        remedy = f"free some space: kv.disk_reserve keeps {config.kv.disk_reserve:.0%}, and no KV is written there"
        yield Finding("disk reserve", "warn", place, remedy)


def _nixl(config: Config) -> Iterator[Finding]:
    # In a child process: its native libraries start threads and may end the process.
    try:
        done = subprocess.run(
            [sys.executable, "-c", "import nixl_cu12._api"],
            capture_output=True,
            text=True,
            timeout=NIXL_TIMEOUT_S,
            check=False,
        )
        why = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        done, why = None, f"no answer within {NIXL_TIMEOUT_S:.0f} s"
    if done is not None and done.returncode == 0:
        yield Finding("nixl", "ok", importlib.metadata.version("nixl-cu12"))
    else:
        yield Finding(
            "nixl",
            "warn",
            f"cannot be imported ({why})",
            f"nodes use the socket transport; {PIP} nixl-cu12 brings NIXL",
        )


def _device(config: Config) -> Iterator[Finding]:
    cuda = Path("/dev/nvidiactl").exists()
    yield Finding(
        "device", "ok", "an NVIDIA driver is here" if cuda else "no NVIDIA driver; the worker computes on the CPU"
    )
    if not machine.on_host(config):
        yield from gpus_for(config.nodes.devices, gpus.seen(), load_links(config, len(config.models)))


def gpus_for(devices: int, found: int, links: int = 1) -> Iterator[Finding]:
    """A finding if a node's devices exceed the CUDA devices found here; none if there is no CUDA device at all. links:
    over which each loads weights."""
    if found == 1 < links:
        detail = f"worker.load_links = {links}, and one CUDA device is here: the workers do not start"
        yield Finding("devices", "fail", detail, "set worker.load_links: 1")
    elif found == 1 < devices:
        yield Finding(
            "devices",
            "warn",
            f"nodes.devices = {devices}, and one CUDA device is here: they share it",
            "set nodes.devices: 1",
        )
    elif 0 < found < devices:
        detail = f"nodes.devices = {devices}, and {found} CUDA devices are here: the other workers do not start"
        yield Finding("devices", "fail", detail, f"set nodes.devices: {found}")


def _kernels(config: Config) -> Iterator[Finding]:
    if config.worker.kernels == "torch" or config.worker.device == "cuda":
        yield Finding("kernels", "ok", "none are compiled for the CPU, as worker.kernels or worker.device says")
        return
    command = [sys.executable, "-m", "worker.kernels.examine", config.worker.kernels]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
        said = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        said = {"missing": f"not built within {BUILD_TIMEOUT_S:.0f} s"}
    except ValueError:
        said = {"missing": (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]}
    if "speed" in said:
        slow = said["slow"]
        remedy = (
            "free the processor and look again; else install a newer C++ compiler (CXX names another), or report this"
            if slow
            else ""
        )
        yield Finding("kernels", "warn" if slow else "ok", "; ".join(filter(None, (said["speed"], slow))), remedy)
    elif config.worker.kernels == "auto":
        remedy = "on a CPU torch computes, about half as fast; install a C++ compiler, or report this"
        yield Finding("kernels", "warn", said["missing"], remedy)
    else:
        yield Finding("kernels", "fail", said["missing"], "install a C++ compiler, or set worker.kernels: auto")


def _weights(config: Config) -> Iterator[Finding]:
    """Compares all bytes of the weights with the digest that workers remember, by which they tell models' KV apart."""
    digests = config.run_dir / "digests"
    command = [sys.executable, "-m", "worker.models.digest", str(config.model), str(digests)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=WEIGHTS_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        yield Finding(
            "weights", "warn", f"{config.model} was not read within {WEIGHTS_TIMEOUT_S:.0f} s", "is the disk well?"
        )
        return
    try:
        said = json.loads(done.stdout)
    except ValueError:
        why = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        yield Finding("weights", "fail", why, "download the model again, or give another --model")
        return
    if said["remembered"] is None:
        yield Finding("weights", "ok", f"{config.model}: read; no digest of them is remembered")
    elif said["remembered"] == said["computed"]:
        yield Finding("weights", "ok", f"{config.model}: every byte fits the digest that is remembered")
    else:
        remedy = f"stop the stack, delete {digests}, and start again: KV of other weights would be used for these"
        yield Finding(
            "weights", "fail", f"{config.model}: the digest that is remembered is not that of these weights", remedy
        )


def _listening(config: Config) -> Iterator[Finding]:
    hosts = {use.host for use in machine.ports_of(config)}
    open_hosts = sorted(hosts - LOOPBACK)
    if open_hosts:
        yield Finding(
            "listening",
            "warn",
            f"beyond loopback: {', '.join(open_hosts)}",
            "only the gateway checks keys; fence the other ports",
        )
    else:
        yield Finding("listening", "ok", "on loopback only")
