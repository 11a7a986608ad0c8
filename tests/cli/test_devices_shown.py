"""How several devices of a node are shown, counted and checked."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from cli import machine
from cli.doctor import gpus_for
from cli.fleet import show_fleet
from cli.settings import Flags, layout
from contracts.errors import ConfigError
from runtime.config_file import load_config
from runtime.sections import GIB


def device(node: int, number: int, devices: int = 2) -> dict[str, Any]:
    name = f"node-{node}/{number}" if devices > 1 else f"node-{node}"
    below = {"dram_bytes_total": 2 * GIB, "dram_bytes_used": GIB, "ssd_bytes_used": 3 * GIB, "sessions": 7}
    return {
        "node": name,
        "on_node": f"node-{node}",
        "device": number,
        "serving": True,
        "models": [{"name": "m"}],
    } | below


@pytest.mark.parametrize("width", [160, 80])
def test_what_a_node_has_below_hbm_is_said_once_and_devices_are_counted(width: int) -> None:
    told = io.StringIO()
    nodes = [device(0, 0), device(0, 1), device(1, 0), device(1, 1)]
    show_fleet(Console(file=told, width=width), True, {"ready": True, "expected_nodes": 4, "nodes": nodes})
    assert "4 of 4 devices serve" in told.getvalue()
    rows = [line.split() for line in told.getvalue().splitlines() if line.startswith("node-")]
    assert [row[0] for row in rows] == ["node-0/0", "node-0/1", "node-1/0", "node-1/1"]
    assert [row[-1] == "7" for row in rows] == [True, False, True, False]


def test_a_fleet_of_one_device_a_node_is_counted_in_nodes() -> None:
    told = io.StringIO()
    nodes = [device(n, 0, 1) for n in range(2)]
    show_fleet(Console(file=told, width=160), True, {"ready": True, "expected_nodes": 2, "nodes": nodes})
    assert "2 of 2 nodes serve" in told.getvalue() and told.getvalue().count(" 7") == 2


def test_every_device_takes_its_ports_and_its_device_memory_and_a_node_its_arena_once() -> None:
    said = {"kv": {"hbm_gib": 1, "dram_gib": 2}, "worker": {"device": "cpu"}}
    one, two = (load_config(None, said | {"nodes": {"count": 2, "devices": devices}}) for devices in (1, 2))
    assert machine.memory_bytes(two)[0] - machine.memory_bytes(one)[0] == 2 * GIB
    assert machine.shared_memory_bytes(two)[0] == machine.shared_memory_bytes(one)[0]
    more = {(use.purpose, use.port) for use in machine.ports_of(two)} - {
        (use.purpose, use.port) for use in machine.ports_of(one)
    }
    assert more == {
        *((f"worker of node-{n}/1", 8120 + 2 * n) for n in range(2)),
        *((f"worker metrics of node-{n}/1", 8121 + 2 * n) for n in range(2)),
    }


def test_flags_say_how_many_devices_a_node_has_and_ports_follow() -> None:
    config = layout(Flags(nodes=2, devices=3, port=9000))
    assert (config.nodes.devices, config.node(0).devices[1].worker_address) == (3, "127.0.0.1:9040")
    with pytest.raises(ConfigError, match="--devices 17 is out of range; give a number from 1 to 16"):
        layout(Flags(devices=17))
    with pytest.raises(
        ConfigError, match=r"--port 65480: 2 nodes of 16 devices need ports up to 65579; give one of at most 65436"
    ):
        layout(Flags(nodes=2, devices=16, port=65480))


@pytest.mark.parametrize(("seen", "level"), [(1, "warn"), (2, "fail"), (4, None), (0, None)])
def test_the_doctor_says_where_there_are_fewer_gpus_than_devices(seen: int, level: str | None) -> None:
    assert [finding.level for finding in gpus_for(4, seen)] == ([level] if level else [])
    assert [finding.level for finding in gpus_for(4, 1, 2)] == ["fail"], "nobody else's link is there"
