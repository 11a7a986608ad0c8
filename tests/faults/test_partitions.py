"""Nodes that no longer hear each other, one way or both, before and in the middle of transfers: every load is answered,
no byte is wrong, and when the network is whole again peers are read again and nothing is left pinned or leased.

Real stores in network namespaces; the blob tier is a directory that both reach, or is emptied where the peer is the
only source.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from contracts.ids import SessionKey
from runtime.config_file import dump_config, load_config
from storelink import credentials
from tests.certificates import certificates
from tests.faults.netns import INTERFACE, Network, NotPermitted
from tests.kvstore.conftest import Stack
from tests.kvstore.fake_worker import FakeWorker, Loaded, make_chunks, make_manifest, make_shape
from tests.kvstore.store_metrics import store_metrics, until_nothing_is_held

pytestmark = [pytest.mark.faults, pytest.mark.timeout(280)]

SHAPE = make_shape()
#: A load is answered within this time; by nothing, where the peer was the only source.
LOAD_S = 30.0
#: When the network is whole, peers are read again within this time.
WELL_S = 90.0
CUTS = {"the answers are lost": [(0, 1)], "the questions are lost": [(1, 0)], "nothing passes": [(0, 1), (1, 0)]}


class NamespacedStack(Stack):
    """Each node's store in the namespace of its node."""

    def __init__(self, network: Network, config: Any, file: Path) -> None:
        super().__init__(config, file)
        self.network = network

    def start(self, node: int) -> None:
        command = [sys.executable, "-m", "kvstore", "--config", str(self.file), "--node", str(node)]
        log = self.file.with_name(f"kvstore-{node}.log").open("ab")
        root = Path(__file__).parents[2]
        self.processes[node] = subprocess.Popen(
            [*self.network.inside(node), *command], stdout=log, stderr=log, cwd=root
        )

    def worker(self, node: int) -> FakeWorker:
        """One on the node, with its certificate."""
        certificate = self.config.tls.directory / f"node-{node}"
        return FakeWorker(self.address(node), [SHAPE], certificate=certificate)


@pytest.fixture
def network() -> Iterator[Network]:
    try:
        with Network(2) as made:
            yield made
    except NotPermitted as e:
        pytest.skip(f"network namespaces are not to be had here: {e}")


@pytest.fixture(params=["socket", "auto", "nixl"])
def stack(
    request: pytest.FixtureRequest, network: Network, tmp_path: Path, free_ports: Callable[[int], int]
) -> Iterator[NamespacedStack]:
    overrides = {
        "data": str(tmp_path / "data"),
        "run_dir": str(tmp_path / "run"),
        "nodes": {
            "base_port": free_ports(40),
            "count": 2,
            "store_host": network.host_pattern,
            "ucx_interface": INTERFACE,
        },
        "kv": {"dram_gib": 0.0625, "transport": request.param},
        "tls": {"directory": str(certificates(tmp_path / "certs", 2))},
    }
    config = load_config(None, overrides)
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config))
    made = NamespacedStack(network, config, file)
    for node in range(2):
        made.start(node)
    yield made
    made.stop()
    credentials.use(None)


def session(number: int) -> SessionKey:
    return SessionKey("default", f"s-{number}")


def assert_true(loaded: Loaded, chunks: dict[bytes, list[bytes]]) -> None:
    """Whatever came is right, and what is said to be usable came."""
    values = list(chunks.values())
    for (i, layer), piece in loaded.pieces.items():
        assert piece == values[i][layer], (i, layer)
    assert all((i, layer) in loaded.pieces for i in range(loaded.usable) for layer in range(SHAPE.layers))


async def saved(
    stack: NamespacedStack, worker: FakeWorker, number: int, count: int, *, in_blob: bool
) -> dict[bytes, list[bytes]]:
    """A session's chunks, on the worker's node, and in blob or nowhere else."""
    chunks = make_chunks(SHAPE, count, number)
    assert not (await worker.save(session(number), SHAPE, chunks)).refused
    worker.turn(make_manifest(session(number), SHAPE, list(chunks), 1.0 + number))
    assert (await worker.flush()).complete
    if not in_blob:
        shutil.rmtree(stack.config.data / "blob" / "v3" / "chunks")
    return chunks


def ask(worker: FakeWorker, number: int, chunks: dict[bytes, list[bytes]], source: int) -> asyncio.Task[Loaded]:
    load = worker.load(SHAPE, list(chunks), session=session(number), sources=[f"node-{source}"], limit_s=LOAD_S)
    return asyncio.ensure_future(load)


async def until_peers_are_read(
    stack: NamespacedStack, first: FakeWorker, second: FakeWorker, numbers: Iterator[int]
) -> None:
    """The network is whole: within a time each node has all of what only the other one holds."""
    async with asyncio.timeout(WELL_S):
        for owner, reader, source in ((first, second, 0), (second, first, 1)):
            while True:
                number = next(numbers)
                chunks = await saved(stack, owner, number, 4, in_blob=False)
                loaded = await ask(reader, number, chunks, source)
                assert_true(loaded, chunks)
                if loaded.usable == len(chunks):
                    break
    for node in range(2):
        await until_nothing_is_held(stack.address(node))


async def test_while_the_network_is_whole_peers_are_read_through_it(stack):
    numbers = itertools.count(1)
    async with stack.worker(0) as first, stack.worker(1) as second:
        await until_peers_are_read(stack, first, second, numbers)
        said = await store_metrics(stack.address(1))
        assert said['read_bytes_total{source="peer"}'] >= 4 * SHAPE.chunk_bytes


@pytest.mark.parametrize("cut", CUTS)
async def test_a_partition_before_a_load_costs_the_peer_and_not_the_answer(stack, cut):
    numbers = itertools.count(1)
    async with stack.worker(0) as first, stack.worker(1) as second:
        await until_peers_are_read(stack, first, second, numbers)
        only_there = await saved(stack, first, 100, 10, in_blob=False)
        in_blob = await saved(stack, first, 101, 10, in_blob=True)
        for path in CUTS[cut]:
            stack.network.cut(*path)
        from_blob = ask(second, 101, in_blob, 0)
        from_nowhere = ask(second, 100, only_there, 0)
        assert (await from_blob).usable == len(in_blob)
        assert_true(await from_blob, in_blob)
        assert (await from_nowhere).usable == 0
        stack.network.heal()
        await until_peers_are_read(stack, first, second, numbers)


@pytest.mark.parametrize("cut", CUTS)
async def test_a_partition_in_the_middle_of_a_transfer(stack, cut):
    numbers = itertools.count(1)
    async with stack.worker(0) as first, stack.worker(1) as second:
        await until_peers_are_read(stack, first, second, numbers)
        only_there = await saved(stack, first, 100, 40, in_blob=False)
        again = await saved(stack, first, 102, 40, in_blob=True)
        try:
            stack.network.slow(1, 60_000)
        except NotPermitted as e:
            pytest.skip(f"links cannot be slowed here: {e}")
        before = (await store_metrics(stack.address(1)))['read_bytes_total{source="peer"}']
        loads = [ask(second, number, chunks, 0) for number, chunks in ((100, only_there), (102, again))]
        async with asyncio.timeout(LOAD_S):
            while (await store_metrics(stack.address(1)))['read_bytes_total{source="peer"}'] == before:  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.02)
        for path in CUTS[cut]:
            stack.network.cut(*path)
        for load, chunks in zip(loads, (only_there, again), strict=True):
            assert_true(await load, chunks)
        assert (await loads[1]).usable == len(again), "the blob tier has the rest"
        stack.network.heal()
        assert_true(await ask(second, 100, only_there, 0), only_there)
        await until_peers_are_read(stack, first, second, numbers)


async def test_a_slow_link_costs_only_time(stack):
    numbers = itertools.count(1)
    async with stack.worker(0) as first, stack.worker(1) as second:
        await until_peers_are_read(stack, first, second, numbers)
        chunks = await saved(stack, first, 100, 20, in_blob=True)
        try:
            stack.network.slow(1, 1000)
        except NotPermitted as e:
            pytest.skip(f"links cannot be slowed here: {e}")
        loaded = await ask(second, 100, chunks, 0)
        assert_true(loaded, chunks)
        assert loaded.usable == len(chunks), "what the peer is too slow for comes from blob"
        stack.network.heal()
        await until_peers_are_read(stack, first, second, numbers)


async def test_a_distant_peer_is_read_all_the_same(stack):
    numbers = itertools.count(1)
    async with stack.worker(0) as first, stack.worker(1) as second:
        try:
            stack.network.slow(1, 0, delay_ms=80)
        except NotPermitted as e:
            pytest.skip(f"this kernel delays no packets: {e}")
        await until_peers_are_read(stack, first, second, numbers)
        stack.network.heal()


@pytest.mark.parametrize("seed", [1, 2])
async def test_nodes_that_fetch_from_each_other_over_a_network_that_comes_and_goes(stack, seed):
    print(f"seed {seed}")
    rng, numbers = random.Random(seed), itertools.count(1)
    async with stack.worker(0) as first, stack.worker(1) as second:
        await until_peers_are_read(stack, first, second, numbers)
        for turn in range(6):
            number = 1000 + 10 * turn
            mine = await saved(stack, first, number, 12, in_blob=True)
            yours = await saved(stack, second, number + 1, 12, in_blob=True)
            loads = [ask(second, number, mine, 0), ask(first, number + 1, yours, 1)]
            await asyncio.sleep(rng.random() * 0.2)
            for path in rng.choice(list(CUTS.values())):
                stack.network.cut(*path)
            loads += [ask(second, number, mine, 0), ask(first, number + 1, yours, 1)]
            await asyncio.sleep(rng.random())
            if rng.random() < 0.5:
                stack.network.heal()
            for load, chunks in zip(loads, (mine, yours) * 2, strict=True):
                assert_true(await load, chunks)
                assert (await load).usable == len(chunks), "the blob tier has it, whatever becomes of the peer"
            stack.network.heal()
        await until_peers_are_read(stack, first, second, numbers)
