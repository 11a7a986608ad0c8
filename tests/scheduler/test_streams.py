"""Streams that break, come back and overtake each other, over real gRPC; what a draining worker says; how often workers
report."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from contracts.v1 import scheduler_pb2 as pb
from tests.scheduler.test_server import FakeNode, World, key


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    await made.start()
    yield made
    await made.close()


def states(world: World) -> dict[str, str]:
    now = world.service.clock.now()
    return {n.name: n.state(now) for n in world.service.control.fleet.devices.values()}


async def test_a_node_whose_streams_break_again_and_again_gets_no_work_and_no_hints_and_every_turn_is_placed(
    world: World,
) -> None:
    control, chosen, last = world.service.control, list[str](), world.nodes[1]
    for flap in range(8):
        last.die()
        await world.until(lambda: states(world)["node-1"] == "absent")
        last = FakeNode(world.stub, "node-1")
        await world.until(lambda: states(world)["node-1"] != "absent")
        world.nodes[0].worker.put_nowait(pb.WorkerReport(load=pb.WorkerLoad()))
        for turn in range(10):
            chosen.append((await world.place(f"s{flap}-{turn}", f"r{flap}-{turn}")).node)
        advisory = {"session": key(f"h{flap}"), "ttl_s": 60, "advisory_id": f"a{flap}"}
        reply = await world.stub.Advise(pb.AdviseRequest(advisories=[advisory]))
        if flap >= 2:
            assert list(reply.nodes) == ["node-0"]
    assert states(world)["node-1"] == "suspect" and set(chosen[20:]) == {"node-0"}
    assert control.advisories.outcomes["moved"] <= 2, "hints do not follow it back and forth"
    control.validate()
    world.nodes[1] = last


async def test_a_hello_that_was_overtaken_changes_nothing(world: World) -> None:
    control = world.service.control
    newer = pb.StoreHello(node="node-0", address="node-0:2", instance="2", connection=5)
    older = pb.StoreHello(node="node-0", address="late:2", instance="2", connection=4)

    async def stream(*reports: pb.StoreReport) -> AsyncIterator[pb.StoreReport]:
        for report in reports:
            yield report
        await asyncio.sleep(60)

    held = pb.Held(session=key("s"), model="m", tokens_total=64, tokens_here=64, bytes_here=6400, last_use_s=1)
    first = world.stub.StoreReports(
        stream(
            pb.StoreReport(hello=newer),
            pb.StoreReport(held=pb.HeldSessions(full=True, joining=True, number=1, sessions=[held])),
        )
    )
    await world.until(lambda: control.directory.count("node-0") == 1)
    late = world.stub.StoreReports(
        stream(pb.StoreReport(hello=older), pb.StoreReport(held=pb.HeldSessions(full=True, number=1)))
    )
    assert [message async for message in late] == [], "its stream is ended"
    assert control.directory.count("node-0") == 1 and control.fleet.nodes["node-0"].store_address == "node-0:2"
    # The one that it replaced ends now, and takes nothing away.
    world.nodes[0].die()
    await world.until(lambda: states(world)["node-0"] == "absent")
    assert control.fleet.nodes["node-0"].store_here and control.directory.count("node-0") == 1
    first.cancel()
    await world.until(lambda: not control.fleet.nodes["node-0"].store_here)


async def test_reports_of_sessions_that_come_twice_or_late_change_nothing(world: World) -> None:
    control, store = world.service.control, world.nodes[0].store

    def say(number: int, tokens: int, **more: Any) -> None:
        held = pb.Held(
            session=key("s"),
            model="m",
            tokens_total=640,
            tokens_here=tokens,
            bytes_here=tokens * 100,
            last_use_s=number,
        )
        store.put_nowait(pb.StoreReport(held=pb.HeldSessions(number=number, sessions=[held], **more)))

    say(1, 64, full=True, joining=True)
    say(3, 192)
    say(2, 128)
    say(1, 64, full=True, joining=True)
    say(3, 0)
    store.put_nowait(pb.StoreReport(load=pb.StoreLoad(dram_bytes_total=77)))
    await world.until(lambda: control.fleet.nodes["node-0"].dram_bytes_total == 77)
    (session,) = control.directory
    assert session.holders["node-0"].tokens == 192


async def test_a_worker_that_drains_is_left_alone_and_its_hint_moves(world: World) -> None:
    advisory = {"session": key("s"), "ttl_s": 60, "advisory_id": "a"}
    (node,) = (await world.stub.Advise(pb.AdviseRequest(advisories=[advisory]))).nodes
    mine, other = world.nodes if node == "node-0" else reversed(world.nodes)
    mine.worker.put_nowait(
        pb.WorkerReport(load=pb.WorkerLoad(in_flight=["running"], running=1, draining=True, number=1))
    )
    await world.until(lambda: states(world)[mine.name] == "draining")
    assert (await other.command("prefetch")).advisory.session.session_id == "s"
    assert (await world.place("s", "r")).node == other.name
    assert world.service.control.fleet.devices[mine.name].outstanding == {"running"}


async def test_workers_are_told_how_often_to_report(world: World) -> None:
    async def hello() -> AsyncIterator[pb.WorkerReport]:
        yield pb.WorkerReport(hello=pb.WorkerHello(node="node-9", address="a", instance="1"))
        await asyncio.sleep(60)

    call = world.stub.WorkerReports(hello())
    async for command in call:
        assert command.report_every_s == pytest.approx(0.1)
        break
    call.cancel()


async def test_stores_that_join_together_hear_of_each_other_in_a_few_words(world: World) -> None:
    joined = [FakeNode(world.stub, f"node-{n}") for n in range(2, 30)]
    everybody = {node.name for node in (*world.nodes, *joined)}
    for node in (*world.nodes, *joined):
        known, words = set[str](), 0
        while known != everybody:
            known |= set((await node.command("peers")).addresses)
            words += 1
        assert words <= len(joined) / 2, "not one for each that joins"
    for node in joined:
        node.die()
