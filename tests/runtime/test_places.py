"""Ports, files and devices of nodes: nobody gets another's, and device 0 keeps what it has when others join it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import ConfigError
from runtime.config import Config
from runtime.config_file import load_config
from runtime.gpus import visible
from runtime.places import device_ports, node_ports


def nodes(**said: Any) -> Config:
    return load_config(None, {"nodes": said, "tls": {"directory": "/certs"}})


def listening(config: Config) -> list[int]:
    """Every port of every node."""
    found = []
    for number in range(config.nodes.count):
        places = config.node(number)
        first = int(places.store_listen.rpartition(":")[2])
        assert places.socket_listen.endswith(f":{first + 2}")
        found += [first, first + 2, first + 4]
        for device in places.devices:
            found += [int(device.worker_listen.rpartition(":")[2]), device.metrics_port]
    return found


@given(st.integers(1, 20), st.integers(1, 16), st.sampled_from([0, 20_000]))
def test_every_process_has_ports_of_its_own_within_what_is_reserved(
    count: int, devices: int, device_base_port: int
) -> None:
    config = nodes(count=count, devices=devices, device_base_port=device_base_port)
    ports, reserved = listening(config), {*node_ports(config.nodes), *device_ports(config.nodes)}
    assert len(set(ports)) == len(ports) and set(ports) <= reserved
    assert len(device_ports(config.nodes)) == 2 * (devices - 1) * count
    assert config.devices == count * devices == len({d.name for n in range(count) for d in config.node(n).devices})


@given(st.integers(2, 16))
def test_what_a_node_has_with_one_device_stays_with_several(devices: int) -> None:
    one, several = nodes().node(1), nodes(devices=devices).node(1)
    assert (one.store_address, one.socket_address, one.ssd, one.arena_stem) == (
        several.store_address,
        several.socket_address,
        several.ssd,
        several.arena_stem,
    )
    first, (only,) = several.devices[0], one.devices
    assert (first.worker_address, first.metrics_port, first.lock) == (only.worker_address, only.metrics_port, only.lock)
    assert (only.name, first.name, several.devices[1].name) == ("node-1", "node-1/0", "node-1/1")
    assert len({device.lock for device in several.devices}) == devices


def test_each_worker_may_have_a_host() -> None:
    config = nodes(devices=2, worker_host="worker-{n}-{d}", listen_host="0.0.0.0")
    assert [d.worker_address for d in config.node(1).devices] == ["worker-1-0:8111", "worker-1-1:8122"]
    assert config.device(1, 1).worker_listen == "0.0.0.0:8122"


def test_nodes_with_a_host_each_may_have_the_same_ports() -> None:
    config = nodes(count=3, devices=2, same_ports=True, store_host="n-{n}", worker_host="n-{n}", listen_host="0.0.0.0")
    first, last = config.node(0), config.node(2)
    assert (first.store_address, last.store_address) == ("n-0:8100", "n-2:8100")
    assert [device.worker_address for device in last.devices] == ["n-2:8101", "n-2:8110"]
    assert last.store_listen == first.store_listen and last.store_metrics_port == first.store_metrics_port
    assert (node_ports(config.nodes), device_ports(config.nodes)) == (range(8100, 8110), range(8110, 8112))
    assert first.ssd != last.ssd and first.arena_stem != last.arena_stem


@pytest.mark.parametrize("key", ["store_host", "worker_host"])
def test_the_same_ports_on_one_host_are_refused(key: str) -> None:
    hosts = {"store_host": "n-{n}", "worker_host": "n-{n}"}
    with pytest.raises(ConfigError, match=rf"nodes\.same_ports with nodes\.{key} = 'n': 2 nodes .* put \{{n\}} into"):
        nodes(same_ports=True, **(hosts | {key: "n"}))
    assert nodes(count=1, same_ports=True).node(0).store_address == "127.0.0.1:8100"


def test_a_device_that_a_node_does_not_have_is_refused() -> None:
    for device in (-1, 2):
        with pytest.raises(
            ConfigError, match=rf"--device {device}: a node has 2 devices, numbered from 0; .*nodes\.devices"
        ):
            nodes(devices=2).device(0, device)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            {"nodes": {"devices": 2, "device_base_port": 8119}},
            r"nodes\.device_base_port = 8119: .* overlap .* 8100 to 8119; give 8120 or more",
        ),
        (
            {"nodes": {"devices": 2, "device_base_port": 8098}},
            r"nodes\.device_base_port = 8098: the ports 8098 to 8101 ",
        ),
        (
            {"nodes": {"devices": 2}, "gateway": {"port": 8121}},
            r"gateway\.port = 8121 .*further devices.*nodes\.device_base_port",
        ),
        ({"nodes": {"devices": 2}, "scheduler": {"port": 8123}}, r"scheduler\.port = 8123 .*further devices"),
        (
            {"nodes": {"devices": 16, "count": 256, "base_port": 60000}},
            r"nodes\.devices = 16 with nodes\.count = 256 needs ports up to",
        ),
        ({"nodes": {"devices": 17}}, r"nodes\.devices = 17"),
        ({"nodes": {"devices": 0}}, r"nodes\.devices = 0"),
    ],
)
def test_ports_that_collide_or_are_too_many_are_refused_by_name(said: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load_config(None, said)


def test_a_block_that_is_elsewhere_stays_when_nodes_are_added() -> None:
    few, many = (nodes(count=count, devices=3, device_base_port=9000) for count in (2, 5))
    assert [few.node(n) for n in range(2)] == [many.node(n) for n in range(2)]


# ---- which GPU


@pytest.mark.parametrize(
    ("said", "count", "device", "expected"),
    [
        (None, 8, 3, "3"),
        ("4,5", 2, 1, "5"),
        ("GPU-a, GPU-b", 2, 1, "GPU-b"),
        (None, 1, 1, None),
        ("7", 1, 1, None),
        (None, 0, 1, None),
    ],
)
def test_a_worker_sees_its_own_device_of_those_that_are_visible(
    said: str | None, count: int, device: int, expected: str | None
) -> None:
    assert visible(said, count, device) == expected


def test_a_device_that_is_not_there_stops_the_start() -> None:
    with pytest.raises(
        ConfigError,
        match=r"nodes\.devices: this worker has device 2, and its process sees 2 CUDA devices .* is not set",
    ):
        visible(None, 2, 2)
