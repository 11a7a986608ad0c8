"""Which stores are asked where a session is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from contracts.v1 import common_pb2, kvstore_pb2, kvstore_pb2_grpc, scheduler_pb2
from tests.scheduler.test_server import FakeNode, World, key


class Store(kvstore_pb2_grpc.KvStoreServicer):
    """Answers with one chunk in DRAM, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[kvstore_pb2.ResidencyRequest] = []
        self.server = grpc.aio.server()
        kvstore_pb2_grpc.add_KvStoreServicer_to_server(self, self.server)
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"

    async def Residency(self, request: kvstore_pb2.ResidencyRequest, context: Any) -> kvstore_pb2.ResidencyReply:
        self.asked.append(request)
        return kvstore_pb2.ResidencyReply(
            known=True, tiers=[common_pb2.TierResidency(tier="dram", layer_chunks=[1, 1])]
        )


@pytest.fixture
async def stores() -> AsyncIterator[list[Store]]:
    made = [Store() for _ in range(3)]
    for store in made:
        await store.server.start()
    yield made
    for store in made:
        await store.server.stop(0)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    await made.start()
    yield made
    await made.close()


async def test_a_quick_look_asks_holders_and_the_hinted_node_and_a_thorough_one_everybody(
    world: World, stores: list[Store]
) -> None:
    nodes = [FakeNode(world.stub, f"node-{7 + i}", store.address) for i, store in enumerate(stores)]
    fleet, directory = world.service.control.fleet, world.service.control.directory
    await world.until(lambda: sum(n.serving for n in fleet.devices.values()) == 5)
    for node in world.nodes:
        node.die()
    await world.until(lambda: sum(n.store_here for n in fleet.nodes.values()) == 3)
    nodes[0].hold("s", 128)
    await world.until(lambda: len(directory) == 1)

    async def look(local: bool) -> tuple[list[str], list[list[bool]]]:
        for store in stores:
            store.asked.clear()
        reply = await world.stub.GetSession(scheduler_pb2.GetSessionRequest(session=key("s"), local=local))
        assert reply.known
        return sorted(n.node for n in reply.nodes), [[asked.local for asked in store.asked] for store in stores]

    assert await look(True) == (["node-7"], [[True], [], []])
    hint = common_pb2.Advisory(session=key("s"), model_id="m", ttl_s=60, advisory_id="a", pin_node="node-8")
    await world.stub.Advise(scheduler_pb2.AdviseRequest(advisories=[hint]))
    assert await look(True) == (["node-7", "node-8"], [[True], [True], []])
    assert await look(False) == (["node-7", "node-8", "node-9"], [[False], [False], [False]])
    for node in nodes:
        node.die()
