"""Nodes that no longer hear each other under conversations that move between them: every turn is answered, and says
what a node that keeps nothing says; when the network is whole again, nodes read from each other again.

A whole stack, each node's store and worker in a network namespace of their own; the gateway and the scheduler reach
both nodes always.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from loadtest.stack import Stack
from runtime.config import Config
from runtime.config_file import dump_config, load_config
from runtime.metrics_page import read_metrics
from storelink import credentials
from storelink.credentials import Credentials
from tests.certificates import certificates
from tests.e2e.chat import Chat, script
from tests.faults.netns import INTERFACE, Network, NotPermitted
from tests.faults.services import ROOT, Services
from tests.kvstore.store_metrics import store_metrics

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.timeout(290)]
MODEL = Path(os.environ.get("UPBEAT_TEST_MODEL", ROOT / "models" / "demo"))
CUTS = {"one way": [(0, 1)], "the other way": [(1, 0)], "both ways": [(0, 1), (1, 0)]}
SEEDS = (0, 1, 2, 3)
TURNS = 8
#: When the network is whole, a conversation's cache is read from its former node within this time.
WELL_S = 90.0


@pytest.fixture(scope="module")
def expected() -> Iterator[list[list[str]]]:
    """What a node that keeps nothing answers to each script."""
    with Stack(model=MODEL, nodes=1, cache=False, hbm_gib=0.25, dram_gib=0.25) as cold:
        chats = [Chat(cold.url, f"cold-{seed}") for seed in SEEDS]
        yield [[chat.say(line).text for line in script(seed, TURNS)] for seed, chat in zip(SEEDS, chats, strict=True)]


class PartedStack(Services):
    """A scheduler and a gateway here, two nodes in their namespaces."""

    def __init__(self, network: Network, config: Config, file: Path) -> None:
        super().__init__(config, file)
        self.network = network

    def inside(self, node: int) -> list[str]:
        return self.network.inside(node)

    def written_back(self, session: str, node: int) -> None:
        """Wait until the object store has what the node has of the session: what comes there later is not forgotten."""
        deadline, held = time.monotonic() + WELL_S, dict[str, int]()
        while not held.get("blob", 0) >= held.get("dram", 0) > 0:
            assert time.monotonic() < deadline, f"{session} does not reach the object store: {held}"
            found = httpx.get(f"{self.url}/v1/sessions/{session}", timeout=10).json()
            here = [holder["tiers"] for holder in found.get("nodes", []) if holder["node"] == f"node-{node}"]
            held = {tier["tier"]: tier["tokens"] for tiers in here for tier in tiers}

    def forget_blob(self) -> None:
        """No chunk is in the object store: a node can have it from the other one, or compute it."""
        shutil.rmtree(self.config.data / "blob" / "v3" / "chunks", ignore_errors=True)

    def read_from_peers(self, node: int) -> float:
        """Bytes that the node has read from the other one."""
        said = asyncio.run(store_metrics(self.config.node(node).store_address))
        return said.get('read_bytes_total{source="peer"}', 0.0)


@pytest.fixture
def stack(tmp_path: Path, free_ports: Callable[[int], int]) -> Iterator[PartedStack]:
    try:
        with Network(2) as network:
            first = free_ports(40)
            overrides = {
                "model": str(MODEL),
                "data": str(tmp_path / "data"),
                "run_dir": str(tmp_path / "run"),
                "gateway": {"port": first},
                "scheduler": {"host": network.here, "port": first + 1},
                "nodes": {
                    "base_port": first + 2,
                    "count": 2,
                    "store_host": network.host_pattern,
                    "worker_host": network.host_pattern,
                    "ucx_interface": INTERFACE,
                },
                # Loads are tried here, however much sooner so small a model computes.
                "kv": {"hbm_gib": 0.125, "dram_gib": 0.125, "load_plan": False},
                "worker": {"threads": 1},
                "tls": {"directory": str(certificates(tmp_path / "certs", 2))},
            }
            config = load_config(None, overrides)
            file = tmp_path / "config.yaml"
            file.write_text(dump_config(config))
            with PartedStack(network, config, file) as made:
                credentials.use(tmp_path / "certs" / "operator")
                yield made
            credentials.use(None)
    except NotPermitted as e:
        pytest.skip(f"network namespaces are not to be had here: {e}")


class Talks:
    """A conversation a seed, all speaking at once; every turn is checked."""

    def __init__(self, stack: PartedStack, expected: list[list[str]]) -> None:
        self._stack, self._expected = stack, expected
        self._chats = [Chat(stack.url, f"talk-{seed}", max_tokens=48) for seed in SEEDS]
        self._lines = [script(seed, TURNS) for seed in SEEDS]
        self._turn = 0

    def all_speak(self, node_of: Callable[[int, int], int]) -> list[int]:
        """The next turn of each; returns the cached tokens. `node_of(seed, turn)`: where it is answered."""
        turn = self._turn

        def speak(seed: int) -> int:
            answer = self._chats[seed].say(self._lines[seed][turn], f"node-{node_of(seed, turn)}", timeout_s=120)
            assert answer.text == self._expected[seed][turn], f"turn {turn} of session {seed}"
            return answer.cached_tokens

        with ThreadPoolExecutor(len(SEEDS)) as pool:
            cached = list(pool.map(speak, SEEDS))
        self._turn += 1
        return cached


def alternate(seed: int, turn: int) -> int:
    """Every turn on the other node than the last."""
    return (seed + turn) % 2


def until_peers_are_read(stack: PartedStack) -> None:
    """Within a time each node answers from what only the other one has."""
    deadline, number = time.monotonic() + WELL_S, 0
    for reader in range(2):
        before = stack.read_from_peers(reader)
        while stack.read_from_peers(reader) == before:
            assert time.monotonic() < deadline, f"node-{reader} reads nothing from its peer"
            number += 1
            session = f"well-{reader}-{number}"
            chat = Chat(stack.url, session)
            lines = script(100 + number, 2)
            chat.say(lines[0], f"node-{1 - reader}")
            stack.written_back(session, 1 - reader)
            stack.forget_blob()
            chat.say(lines[1], f"node-{reader}")


@pytest.mark.parametrize("cut", CUTS)
def test_a_partition_fails_no_turn_and_changes_no_answer(
    stack: PartedStack, expected: list[list[str]], cut: str
) -> None:
    talks = Talks(stack, expected)
    talks.all_speak(alternate)
    assert all(talks.all_speak(alternate)), "the network is whole: what the other node has is not computed again"
    for sender, receiver in CUTS[cut]:
        stack.network.cut(sender, receiver)
    read_before = [stack.read_from_peers(node) for node in range(2)]
    talks.all_speak(alternate)
    stack.forget_blob()
    talks.all_speak(alternate)
    assert [stack.read_from_peers(node) for node in range(2)] == read_before, "the cut is one"
    stack.network.heal()
    talks.all_speak(alternate)
    until_peers_are_read(stack)


def test_a_network_that_comes_and_goes_under_conversations_that_move(
    stack: PartedStack, expected: list[list[str]]
) -> None:
    rng, over = random.Random(4), threading.Event()

    def come_and_go() -> None:
        while not over.wait(rng.uniform(0.05, 0.5)):
            for sender, receiver in CUTS[rng.choice(list(CUTS))]:
                stack.network.cut(sender, receiver)
            over.wait(rng.uniform(0.05, 0.8))
            stack.network.heal()

    talks = Talks(stack, expected)
    talks.all_speak(alternate)
    weather = threading.Thread(target=come_and_go)
    weather.start()
    try:
        for _ in range(TURNS - 1):
            stack.forget_blob()
            talks.all_speak(alternate)
    finally:
        over.set()
        weather.join()
        stack.network.heal()
    until_peers_are_read(stack)


#: Asks a gRPC port without a certificate, and any port in plain text; prints what came of it.
PROBE = """
import socket, sys
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
address = sys.argv[1]
with grpc.insecure_channel(address) as channel:
    try:
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        print("answered")
    except grpc.RpcError as e:
        print(e.code().name)
host, _, port = address.rpartition(":")
with socket.create_connection((host, int(port)), timeout=10) as plain:
    plain.sendall(b"GET /metrics HTTP/1.0\\r\\n\\r\\n")
    try:
        print(b"upbeat" in plain.recv(65536))
    except ConnectionError:
        print(False)
"""


def test_a_neighbour_on_the_network_gets_nowhere_without_a_certificate(stack: PartedStack) -> None:
    node, device = stack.config.node(0), stack.config.device(0, 0)
    host = device.worker_address.rpartition(":")[0]
    metrics = [f"{host}:{port}" for port in (node.store_metrics_port, device.metrics_port)]
    addresses = [
        stack.config.scheduler_addresses[0],
        node.store_address,
        node.socket_address,
        device.worker_address,
        *metrics,
    ]
    for address in addresses:
        command = [*stack.network.inside(1), sys.executable, "-c", PROBE, address]
        said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout.split()
        assert said == ["UNAVAILABLE", "False"], address
    own = Credentials(stack.config.tls.directory / "operator") if stack.config.tls.directory else None
    deadline = time.monotonic() + 60
    while not (
        refused := re.search(
            r"^upbeat_handshakes_refused_total ([1-9]\S*)", read_metrics(host, node.store_metrics_port, own), re.M
        )
    ):
        assert time.monotonic() < deadline, "refusals are counted"
        time.sleep(0.5)
    assert float(refused[1]) >= 2
