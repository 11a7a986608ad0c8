"""Connections to a server with certificates that lead to no call are counted; others are not."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from contracts.identity import OPERATOR, node
from runtime import handshakes, rpc
from storelink import credentials
from storelink.channel import blocking_channel
from storelink.credentials import Credentials
from tests.certificates import certificates

NODE_0 = node("node-0")


def count() -> float:
    return handshakes._REFUSED._value.get()


@pytest.fixture
async def fleet(tmp_path: Path, free_ports: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """(directory, address of a server of node-0)"""
    monkeypatch.setattr(handshakes, "_WITHIN_S", 1.0)
    directory = certificates(tmp_path / "fleet", 1)
    credentials.use(directory / "node-0")
    address = f"127.0.0.1:{free_ports(1)}"
    server, checker = rpc.server(address, [])
    await server.start()
    await rpc.set_serving(checker, True)
    yield directory, address
    await server.stop(None)
    credentials.use(None)


def ask(address: str, own: Credentials | None) -> str:
    with blocking_channel(address, NODE_0, own) as channel:
        try:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=3)
        except grpc.RpcError as e:
            return str(e.code().name)
    return "OK"


async def test_callers_of_the_fleet_are_not_counted(fleet: Any) -> None:
    directory, address = fleet
    before = count()
    for _ in range(5):
        assert await asyncio.to_thread(ask, address, Credentials(directory / str(OPERATOR))) == "OK"
    await asyncio.sleep(1.5)
    assert count() == before


async def test_callers_without_a_certificate_or_with_anothers_are_counted(fleet: Any, tmp_path: Path) -> None:
    directory, address = fleet
    others = certificates(tmp_path / "others", 1)
    before = count()
    assert await asyncio.to_thread(ask, address, None) == "UNAVAILABLE"
    assert await asyncio.to_thread(ask, address, Credentials(others / str(OPERATOR))) == "UNAVAILABLE"
    host, port = address.split(":")
    with socket.create_connection((host, int(port))) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
        await asyncio.sleep(0.2)
    assert await asyncio.to_thread(ask, address, Credentials(directory / str(OPERATOR))) == "OK"
    await asyncio.sleep(2.5)
    assert count() >= before + 3


async def test_one_line_tells_of_many(fleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshakes, "_log", handshakes._Log())
    lines: list[int] = []
    monkeypatch.setattr(handshakes.log, "warning", lambda event, count: lines.append(count), raising=False)
    for _ in range(20):
        handshakes.refused()
    assert lines == [1]
