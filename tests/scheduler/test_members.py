"""Nodes that join and leave a running fleet: who is a member, and the order of a leave."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from contracts.errors import InvalidRequest
from contracts.v1 import scheduler_pb2 as pb
from scheduler.core.membership import MOST_NODES, Membership
from tests.scheduler.test_server import FakeNode, World


def test_configured_nodes_are_members_and_others_from_their_hello_until_they_left() -> None:
    core = Membership(["node-0", "node-1"])
    assert core.members == {"node-0", "node-1"} and not core.changed
    assert not core.hello("node-1") and core.hello("node-2") and core.changed
    core.leave("node-1")
    assert core.members == {"node-0", "node-1", "node-2"} and core.leaving == {"node-1"}
    assert core.end("node-1") and not core.end("node-1")
    assert core.members == {"node-0", "node-2"} and core.former == {"node-1"} and not core.leaving
    assert core.hello("node-1"), "it may come back"
    assert core.members == {"node-0", "node-1", "node-2"}


@pytest.mark.parametrize("name", ["", "a b", "../x", "node-1\n", "-x", "x" * 64, "node-0/1"])
def test_an_impossible_name_is_refused(name: str) -> None:
    core = Membership(["node-0"])
    with pytest.raises(InvalidRequest) as refused:
        core.hello(name)
    assert refused.value.param == "node" and core.members == {"node-0"}


def test_there_is_a_most_of_nodes() -> None:
    core = Membership(["node-0"])
    for number in range(1, MOST_NODES):
        core.hello(f"node-{number}")
    with pytest.raises(InvalidRequest, match="upbeat leave"):
        core.hello("one-more")


@pytest.mark.parametrize("seed", range(5))
def test_what_is_kept_gives_the_same_members_after_a_restart(seed: int) -> None:
    rng = random.Random(seed)
    configured = ["node-0", "node-1", "node-2"]
    core = Membership(configured)
    for _ in range(200):
        name = f"node-{rng.randrange(6)}"
        choice = rng.randrange(3)
        if choice == 0:
            core.hello(name)
        elif choice == 1 and name in core.members:
            core.leave(name)
        else:
            core.end(name)
        core.validate()
        again = Membership(configured)
        again.restore(core.stored())
        again.validate()
        assert (again.members, again.leaving, again.former) == (core.members, core.leaving, core.former)


@pytest.mark.parametrize("joined", [None, "x", ["a b"], [1]])
def test_a_file_that_makes_no_sense_is_refused(joined: Any) -> None:
    with pytest.raises(ValueError, match="no list of nodes' names"):
        Membership(["node-0"]).restore({"joined": joined, "left": [], "leaving": []})


# ---- over gRPC ---------------------------------------------------------------------------------------------------
@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World()
    await made.start(tmp_path)
    yield made
    await made.close()


async def leave(world: World, node: str, *, lost: bool = False) -> pb.LeaveNodeReply:
    reply: pb.LeaveNodeReply = await world.stub.LeaveNode(pb.LeaveNodeRequest(node=node, lost=lost))
    return reply


async def test_a_node_that_joins_is_expected_and_owes_erasures(world: World) -> None:
    core = world.service.control.membership
    third = FakeNode(world.stub, "node-7")
    await world.until(lambda: world.service.control.fleet.serving == 3)
    told = await third.command("peers")
    assert set(told.members) == core.members == {"node-0", "node-1", "node-7"}
    assert (await world.service.views.fleet()).expected_nodes == 3
    for node in world.nodes:
        while "node-7" not in (await node.command("peers")).members:
            pass
    third.die()
    await world.until(lambda: world.service.control.fleet.serving == 2)
    assert "node-7" in core.members, "what is merely down must still confirm"


async def test_a_node_leaves_in_order_and_is_forgotten(world: World, tmp_path: Path) -> None:
    service, node = world.service, world.nodes[1]
    assert (await leave(world, "node-1")).state == "draining"
    assert (await world.place("s")).node == "node-0", "no new work goes to it"
    assert not service.control.fleet.device("node-1").serving
    node.end_worker()
    await node.command("leave")
    reply = await leave(world, "node-1")
    assert reply.state == "writing"
    node.store.put_nowait(pb.StoreReport(leaving=pb.StoreLeaving(waits_for="the blob tier", pending_bytes=7)))
    await world.until(lambda: service.members._said)
    reply = await leave(world, "node-1")
    assert (reply.state, reply.waits_for, reply.pending_bytes) == ("writing", "the blob tier", 7)
    node.store.put_nowait(pb.StoreReport(leaving=pb.StoreLeaving(over=True)))
    await world.until(lambda: service.control.membership.members == {"node-0"})
    assert (await leave(world, "node-1")).state == "left"
    fleet = await service.views.fleet()
    assert [n.node for n in fleet.nodes] == ["node-0"] and fleet.expected_nodes == 1
    while not (told := await world.nodes[0].command("peers")).gone:
        pass
    assert list(told.gone) == ["node-1"] and list(told.members) == ["node-0"]
    assert (tmp_path / "members" / "0.json").read_text() == '{"joined": [], "left": ["node-1"], "leaving": []}'


async def test_a_leave_goes_on_after_a_restart_of_the_scheduler(world: World, tmp_path: Path) -> None:
    await leave(world, "node-1")
    await world.service.members.write()
    again = World()
    await again.start(tmp_path, serving=1)
    assert again.service.control.membership.leaving == {"node-1"}
    await again.until(lambda: again.service.control.fleet.device("node-1").draining)
    again.nodes[1].end_worker()
    await again.nodes[1].command("leave")
    await again.close()


async def test_the_last_node_of_a_model_an_unknown_and_an_absent_one_cannot_leave(world: World) -> None:
    for node, status, words in (
        ("node-9", grpc.StatusCode.NOT_FOUND, "nodes: node-0, node-1"),
        ("node-1", None, ""),
        ("node-0", grpc.StatusCode.INVALID_ARGUMENT, "last node that serves m"),
    ):
        if status is None:
            await leave(world, node)
            continue
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await leave(world, node)
        assert refused.value.code() is status and words in str(refused.value.details())
    with pytest.raises(grpc.aio.AioRpcError, match="without --lost"):
        await leave(world, "node-0", lost=True)


async def test_a_lost_node_owes_nothing_any_more(world: World) -> None:
    world.nodes[1].die()
    await world.until(lambda: not world.service.control.fleet.nodes["node-1"].store_here)
    with pytest.raises(grpc.aio.AioRpcError, match="--lost"):
        await leave(world, "node-1")
    erasure = world.service.control.erasures.begin(("t", "s"), {"node-1"})  # type: ignore[arg-type]
    assert (await leave(world, "node-1", lost=True)).state == "left"
    assert not erasure.owing and not world.service.control.erasures.owed_by("node-1")


async def test_a_second_process_of_a_name_is_refused_while_the_first_is_heard(world: World) -> None:
    other = pb.StoreHello(node="node-1", address="elsewhere:2", instance="other")

    async def hello() -> AsyncIterator[pb.StoreReport]:
        yield pb.StoreReport(hello=other)

    world.nodes[1].store.put_nowait(pb.StoreReport(load=pb.StoreLoad()))
    with pytest.raises(grpc.aio.AioRpcError, match="runs already at node-1:2"):
        async for _ in world.stub.StoreReports(hello()):
            pass
    assert world.service.control.fleet.nodes["node-1"].store_address == "node-1:2"


async def test_a_node_that_nobody_knows_can_be_declared_lost(world: World) -> None:
    """Its disk may come back, though the configuration no longer names it."""
    assert (await leave(world, "node-8", lost=True)).state == "left"
    while not (told := await world.nodes[0].command("peers")).gone:
        pass
    assert list(told.gone) == ["node-8"]
    with pytest.raises(grpc.aio.AioRpcError, match="no node is called"):
        await leave(world, "../node-8", lost=True)
