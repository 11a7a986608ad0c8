"""Where a node's processes listen and keep things: every address, port and path follows from the configuration and two numbers.

A node has ten ports from `nodes.base_port` + 10 n. Its further devices have two each (worker, metrics) in one block behind those of all
nodes, or from `nodes.device_base_port`, so that what stands in the first ten is the same however many devices there are.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from contracts.devices import device_name

if TYPE_CHECKING:
    from runtime.config import Config, NodesSection

#: Ports of a node, and of each of its devices but the first.
PORTS_A_NODE, PORTS_A_DEVICE = 10, 2
#: Of a node's ports, its worker's metrics; of a further device's, the same.
_METRICS, _METRICS_OF_DEVICE = 3, 1


@dataclass(frozen=True, slots=True)
class DevicePlaces:
    """One device's, that is, its worker's. number: on its node, from 0; name: as placement knows it (contracts.devices)."""

    number: int
    name: str
    worker_address: str
    worker_listen: str
    metrics_port: int
    lock: Path


@dataclass(frozen=True, slots=True)
class NodePlaces:
    """One node's. arena_stem: what the names of its arenas begin with (storelink/arena_sharing.py). devices: by number."""

    name: str
    store_address: str
    store_listen: str
    socket_address: str
    socket_listen: str
    ssd: Path
    directory: Path
    arena_stem: Path
    devices: tuple[DevicePlaces, ...]


def node_ports(nodes: NodesSection) -> range:
    """The ports of all nodes, but for those of further devices."""
    return range(nodes.base_port, nodes.base_port + PORTS_A_NODE * nodes.count)


def device_ports(nodes: NodesSection) -> range:
    """The ports of all nodes' devices but the first of each; none where a node has one."""
    first = nodes.device_base_port or node_ports(nodes).stop
    return range(first, first + PORTS_A_DEVICE * (nodes.devices - 1) * nodes.count)


def places_of(config: Config, number: int) -> NodePlaces:
    """Of node `number`."""
    n, base = config.nodes, config.nodes.base_port + PORTS_A_NODE * number
    name, store = f"node-{number}", n.store_host.replace("{n}", str(number))
    directory = config.data / name
    return NodePlaces(
        name=name,
        store_address=f"{store}:{base}",
        store_listen=f"{n.listen_host or store}:{base}",
        socket_address=f"{store}:{base + 2}",
        socket_listen=f"{n.listen_host or store}:{base + 2}",
        ssd=directory / "ssd",
        directory=directory,
        arena_stem=config.shm_dir / f"upbeat-{os.getuid()}-{_tag(config.data)}-{name}",
        devices=tuple(_device(n, number, device, directory) for device in range(n.devices)),
    )


def _device(nodes: NodesSection, number: int, device: int, directory: Path) -> DevicePlaces:
    host = nodes.worker_host.replace("{n}", str(number)).replace("{d}", str(device))
    if device:
        port = device_ports(nodes).start + PORTS_A_DEVICE * ((nodes.devices - 1) * number + device - 1)
        metrics = port + _METRICS_OF_DEVICE
    else:
        port, metrics = (nodes.base_port + PORTS_A_NODE * number + offset for offset in (1, _METRICS))
    return DevicePlaces(
        number=device,
        name=device_name(f"node-{number}", device, nodes.devices),
        worker_address=f"{host}:{port}",
        worker_listen=f"{nodes.listen_host or host}:{port}",
        metrics_port=metrics,
        lock=directory / ("worker.lock" if not device else f"worker-{device}.lock"),
    )


def _tag(data: Path) -> str:
    return hashlib.sha256(str(data).encode()).hexdigest()[:10]
