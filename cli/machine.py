"""Checks before a stack starts: ports, shared memory, memory, disks, and locks on its directories.

Each refusal is a ConfigError that names what to change.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from contracts.errors import ConfigError
from runtime.config import Config
from runtime.disk_shares import blob_directory, blob_limit_bytes, disk_of, reserve_bytes, ssd_limit_bytes
from runtime.sections import GIB
from runtime.weight_images import remove_unused
from storelink.arena_file import free_bytes
from storelink.arena_sharing import file_bytes, remove_dead

#: Uses of a node's consecutive ports, and of those of each device after its first.
NODE_PORTS = ("store", "worker", "socket transport", "worker metrics", "store metrics")
DEVICE_PORTS = ("worker", "worker metrics")
#: Longest time that services take to end after their launcher was killed, in seconds.
ORPHANS_S = 35.0


@dataclass(frozen=True, slots=True)
class PortUse:
    """One port of a stack. taken_by: the process that listens on it now; empty: none."""

    purpose: str
    host: str
    port: int
    taken_by: str


def ports_of(config: Config) -> list[PortUse]:
    """All ports that the stack listens on here. Raises ConfigError for a host that is not this machine's."""
    wanted = [("gateway", config.gateway.host, config.gateway.port)]
    for n in range(len(config.scheduler_addresses)):
        host, _, port = config.scheduler_listen(n).rpartition(":")
        wanted.append((f"scheduler {n}" if n else "scheduler", host, int(port)))
    uses = [_use(*one) for one in wanted]
    return [*uses, *(use for n in range(config.nodes.count) for use in ports_of_node(config, n))]


def ports_of_node(config: Config, n: int) -> list[PortUse]:
    """The ports of one node and its devices. Raises as `ports_of`."""
    host, _, base = config.node(n).store_listen.rpartition(":")
    wanted = [(f"{purpose} of node-{n}", host, int(base) + i) for i, purpose in enumerate(NODE_PORTS)]
    for device in config.node(n).devices[1:]:
        host, _, port = device.worker_listen.rpartition(":")
        wanted += [(f"{purpose} of {device.name}", host, int(port) + i) for i, purpose in enumerate(DEVICE_PORTS)]
    return [_use(*one) for one in wanted]


def _use(purpose: str, host: str, port: int) -> PortUse:
    return PortUse(purpose, host, port, "" if _can_bind(host, port) else _owner(port))


def check_ports(config: Config, uses: Sequence[PortUse] | None = None) -> None:
    """Raise ConfigError for the first port that is taken. uses: the ports; None: all of the stack's."""
    for use in ports_of(config) if uses is None else uses:
        if use.taken_by:
            raise ConfigError(
                f"--port {config.gateway.port}: port {use.port} ({use.purpose}) is taken by {use.taken_by}; "
                "stop that or give another --port"
            )


def shared_memory_bytes(config: Config) -> tuple[int, int]:
    """(bytes that the arenas need, bytes free in `shm_dir`). Raises ConfigError when `shm_dir` does not exist."""
    try:
        have = free_bytes(config.shm_dir)
        need = file_bytes(int(config.kv.dram_gib * GIB), config.shm_dir)
    except OSError as e:
        raise ConfigError(f"shm_dir = {config.shm_dir}: {e.strerror}; give a tmpfs such as /dev/shm") from None
    return need * len(config.nodes.numbers), have


def on_host(config: Config) -> bool:
    """Whether models are computed on the CPU, so that HBM is host memory; judged without querying a driver."""
    return config.worker.device == "cpu" or (config.worker.device == "auto" and not Path("/dev/nvidiactl").exists())


def memory_bytes(config: Config) -> tuple[int, int]:
    """(bytes that HBM of all devices and DRAM of all nodes need of this machine's memory, its total)."""
    hbm = int(config.kv.hbm_gib * GIB) * config.devices if on_host(config) else 0
    return int(config.kv.dram_gib * GIB) * len(config.nodes.numbers) + hbm, psutil.virtual_memory().total


@dataclass(frozen=True, slots=True)
class DiskRoom:
    """Limits of the slow tiers, in bytes. ssd: of a node; blob: of all nodes, None: no limit.

    free: on the disk of `data`. scarce: a description of each place whose disk has less than `kv.disk_reserve` free, so
    that nothing is written there.
    """

    ssd: int
    blob: int | None
    free: int
    scarce: list[str]

    def __str__(self) -> str:
        blob = "has no limit" if self.blob is None else f"takes up to {self.blob / GIB:.1f} GiB"
        return (
            f"{self.free / GIB:.1f} GiB free; a node's SSD tier takes up to {self.ssd / GIB:.1f} GiB, the blob "
            f"tier {blob}"
        )


def disk_room(config: Config) -> DiskRoom:
    """What the stores will find, except that the tiers' present contents are not counted. Raises OSError."""
    blob = blob_directory(config)
    places = [config.data, *([blob] if blob is not None else [])]
    disks = [disk_of(place) for place in places]
    scarce = [
        f"{place} has {disk.free / disk.total:.1%} of its disk free"
        for place, disk in zip(places, disks, strict=True)
        if disk.free < reserve_bytes(config, disk)
    ]
    ssd = ssd_limit_bytes(config, disks[0], 0)
    return DiskRoom(
        ssd, blob_limit_bytes(config, disks[1] if blob is not None else None, 0, config.data), disks[0].free, scarce
    )


def warn_of_disk(config: Config, say: Callable[[str, str], None]) -> None:
    """Print the tiers' limits and warnings. say: takes (line, style)."""
    try:
        room = disk_room(config)
    except OSError as e:
        say(f"warning: {config.data}: {e.strerror}; no KV will be kept there", "yellow")
        return
    say(f"KV on disk: {config.data}: {room}", "")
    for place in room.scarce:
        say(
            f"warning: {place}, and kv.disk_reserve keeps {config.kv.disk_reserve:.0%}: no KV is written there; "
            "free some space",
            "yellow",
        )


def check_memory(config: Config, images: int = 0, images_left: int = 0) -> None:
    """Raise ConfigError when the arenas, or these bytes of images of weights beside them, do not fit into shared
    memory, or all of it into this machine's. images_left: bytes of images that are there already."""
    need, have = shared_memory_bytes(config)
    flags = f"--dram-gib {config.kv.dram_gib:g} with --nodes {config.nodes.count}"
    if need > have:
        raise ConfigError(
            f"{flags}: the arenas need {need / GIB:.1f} GiB of shared memory, {config.shm_dir} has "
            f"{have / GIB:.1f} GiB free; lower either, or enlarge it (mount -o remount,size=...)"
        )
    if images and need + images > have + images_left:
        raise ConfigError(
            f"{_images_key(config)}: images of weights take up to {images / GIB:.1f} GiB of shared memory beside "
            f"arenas of {need / GIB:.1f} GiB, {config.shm_dir} has {(have + images_left) / GIB:.1f} GiB; lower it "
            "(other models are packed from their files each time), or enlarge that (mount -o remount,size=...)"
        )
    need, have = memory_bytes(config)
    if need + images > have:
        of_images = f" and {_images_key(config)}" if images else ""
        raise ConfigError(
            f"--hbm-gib {config.kv.hbm_gib:g}{each(config)} and {flags}{of_images} need {(need + images) / GIB:.1f} "
            f"GiB, this machine has {have / GIB:.1f} GiB; lower them"
        )


def _images_key(config: Config) -> str:
    limit = config.worker.images_gib
    return "worker.images_gib (not set)" if limit is None else f"worker.images_gib = {limit:g}"


def each(config: Config) -> str:
    """A note for sizes of HBM when nodes have several devices; else empty."""
    return f" (of each of nodes.devices = {config.nodes.devices})" if config.nodes.devices > 1 else ""


def remove_shared_memory(config: Config) -> None:
    """Delete this data directory's arenas whose store has ended, of any number of nodes, and all images of weights that
    no worker uses."""
    stem = config.node(0).arena_stem  # of any number
    remove_dead(sorted(stem.parent.glob(stem.name.removesuffix("0") + "*.arena")))
    remove_unused(config.shm_dir)


def take_lock(path: Path, flag: str, url: str, say: Callable[[str], None]) -> IO[str]:
    """Lock `path` until the returned file, and every child's copy of it, is closed.

    If the holder's launcher has ended, waits for its services to end. Raises ConfigError when another stack runs there.
    """
    file = path.open("a+")
    deadline = time.monotonic() + ORPHANS_S
    waiting = False
    while not _locked(file):
        holder = _holder(path)
        if (holder is not None and psutil.pid_exists(holder[0])) or time.monotonic() >= deadline:
            file.close()
            pid, where = holder or (0, "unknown")
            raise ConfigError(
                f"{flag} {path.parent} is in use by another stack (pid {pid}, {where}); stop it or give another {flag}"
            )
        if not waiting:
            say(f"waiting for the services of an earlier stack to leave {path.parent}")
            waiting = True
        time.sleep(0.1)
    file.truncate(0)
    file.write(json.dumps({"pid": os.getpid(), "url": url}) + "\n")
    file.flush()
    return file


def _locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(path: Path) -> tuple[int, str] | None:
    try:
        data = json.loads(path.read_text())
        return int(data["pid"]), str(data["url"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _can_bind(host: str, port: int) -> bool:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as e:
        raise ConfigError(f"host {host!r} cannot be resolved ({e.strerror}); give an address of this machine") from None
    with socket.socket(family, kind, proto) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(address)
        except OSError as e:
            if e.errno == errno.EADDRNOTAVAIL:
                raise ConfigError(
                    f"host {host!r} is no address of this machine; give one that is, or 127.0.0.1 or 0.0.0.0"
                ) from None
            return False
    return True


def _owner(port: int) -> str:
    try:
        for connection in psutil.net_connections("tcp"):
            if (
                connection.status == psutil.CONN_LISTEN
                and connection.laddr
                and connection.laddr.port == port
                and connection.pid
            ):
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except psutil.Error:
        pass
    return "another process"
