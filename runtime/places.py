"""Addresses, ports and paths of a node's processes, from the configuration and the numbers of node and device.

Node n has ten ports from `nodes.base_port` + 10 n. Each further device has two (worker, metrics), in a block behind the
ports of all nodes or from `nodes.device_base_port`. So the ten ports do not depend on the number of devices. With
`nodes.same_ports` every node has those of node 0, on its own host.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from contracts.devices import device_name
from runtime.sections import NodesSection

#: Ports of a node, and of each device after its first.
PORTS_A_NODE, PORTS_A_DEVICE = 10, 2
#: Offsets of metrics: of the worker and the store within a node's ports, of a further device within its own.
_METRICS, _METRICS_OF_STORE, _METRICS_OF_DEVICE = 3, 4, 1


@dataclass(frozen=True, slots=True)
class DevicePlaces:
    """Addresses and paths of one device's worker. number: on its node, from 0; name: see contracts.devices. adopting:
    `worker.adopting`'s file."""

    number: int
    name: str
    worker_address: str
    worker_listen: str
    metrics_port: int
    lock: Path
    adopting: Path


@dataclass(frozen=True, slots=True)
class NodePlaces:
    """Addresses and paths of one node. arena_stem: common prefix of its arenas (storelink/arena_sharing.py). devices:
    by number."""

    name: str
    store_address: str
    store_listen: str
    store_metrics_port: int
    socket_address: str
    socket_listen: str
    ssd: Path
    directory: Path
    arena_stem: Path
    devices: tuple[DevicePlaces, ...]


def node_ports(nodes: NodesSection) -> range:
    """The ports of all nodes, without those of further devices."""
    return range(nodes.base_port, nodes.base_port + PORTS_A_NODE * _blocks(nodes))


def device_ports(nodes: NodesSection) -> range:
    """The ports of each node's devices after the first; empty when nodes have one device."""
    first = nodes.device_base_port or node_ports(nodes).stop
    return range(first, first + PORTS_A_DEVICE * (nodes.devices - 1) * _blocks(nodes))


def _blocks(nodes: NodesSection) -> int:
    """Nodes with ports of their own."""
    return 1 if nodes.same_ports else len(nodes.numbers)


def _block(nodes: NodesSection, number: int) -> int:
    return 0 if nodes.same_ports or nodes.joins is not None else number


def places_of(nodes: NodesSection, data: Path, shm_dir: Path, number: int) -> NodePlaces:
    """The places of node `number`."""
    n, base = nodes, nodes.base_port + PORTS_A_NODE * _block(nodes, number)
    name, store = f"node-{number}", n.store_host.replace("{n}", str(number))
    directory = data / name
    return NodePlaces(
        name=name,
        store_address=f"{store}:{base}",
        store_listen=f"{n.listen_host or store}:{base}",
        store_metrics_port=base + _METRICS_OF_STORE,
        socket_address=f"{store}:{base + 2}",
        socket_listen=f"{n.listen_host or store}:{base + 2}",
        ssd=directory / "ssd",
        directory=directory,
        arena_stem=shm_dir / f"upbeat-{os.getuid()}-{_tag(data)}-{name}",
        devices=tuple(_device(n, number, device, directory) for device in range(n.devices)),
    )


def _device(nodes: NodesSection, number: int, device: int, directory: Path) -> DevicePlaces:
    host = nodes.worker_host.replace("{n}", str(number)).replace("{d}", str(device))
    block = _block(nodes, number)
    if device:
        port = device_ports(nodes).start + PORTS_A_DEVICE * ((nodes.devices - 1) * block + device - 1)
        metrics = port + _METRICS_OF_DEVICE
    else:
        port, metrics = (nodes.base_port + PORTS_A_NODE * block + offset for offset in (1, _METRICS))
    return DevicePlaces(
        number=device,
        name=device_name(f"node-{number}", device, nodes.devices),
        worker_address=f"{host}:{port}",
        worker_listen=f"{nodes.listen_host or host}:{port}",
        metrics_port=metrics,
        lock=directory / ("worker.lock" if not device else f"worker-{device}.lock"),
        adopting=directory / ("adopting.json" if not device else f"adopting-{device}.json"),
    )


def _tag(data: Path) -> str:
    return hashlib.sha256(str(data).encode()).hexdigest()[:10]
