"""Erasures that wait for the stores' answers: what wakes them, and what an answer costs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from contracts.ids import SessionKey
from contracts.v1 import scheduler_pb2
from scheduler.core.erasures import Erasures, Word
from scheduler.erasure_waits import ErasureWaits
from tests.scheduler.test_server import FakeNode, World, key

GONE, REFUSED = Word(True, True, {}, 3), Word(False, True, {"blob": 1}, taken=False)


class Told(list[str]):
    """The stores told of an erasure. looks: how often it was looked who of them has answered."""

    looks = 0

    def __iter__(self) -> Iterator[str]:
        self.looks += 1
        return super().__iter__()


class Fleet:
    """Erasures that wait for two stores."""

    def __init__(self) -> None:
        self.connected = {"node-0", "node-1"}
        self.erasures, self.waits = Erasures(), ErasureWaits(self.connected)

    async def order(self, session: SessionKey, timeout_s: float = 10.0) -> tuple[Told, asyncio.Task]:
        """Erase, and begin to wait."""
        erasure, told = self.erasures.begin(session, self.connected), Told(sorted(self.connected))
        waiting = asyncio.ensure_future(self.waits.wait(session, erasure, told, timeout_s))
        await asyncio.sleep(0)
        return told, waiting

    def answer(self, node: str, session: SessionKey, word: Word = GONE) -> None:
        self.erasures.heard(node, session, word)
        self.waits.heard(session)

    def leave(self, node: str) -> None:
        self.connected.discard(node)
        self.waits.store_left(node)


def s(name: str) -> SessionKey:
    return SessionKey("t", name)


async def ended(*waiting: asyncio.Task) -> None:
    await asyncio.wait_for(asyncio.gather(*waiting), 1.0)


async def test_an_answer_is_looked_at_for_its_own_session_only() -> None:
    fleet = Fleet()
    own, waiting = await fleet.order(s("own"))
    others = [await fleet.order(s(f"other{n}")) for n in range(100)]
    for node in ("node-0", "node-1"):
        fleet.answer(node, s("own"))
    await ended(waiting)
    assert own.looks == 3, "when it began, and at each answer"
    assert all(told.looks == 1 and not other.done() for told, other in others)
    assert s("own") not in fleet.waits and len(fleet.waits) == 100
    for _, other in others:
        other.cancel()
    await asyncio.wait([other for _, other in others])
    assert not len(fleet.waits)


async def test_many_erasures_of_one_session_cost_one_look_an_answer_and_end_together() -> None:
    fleet = Fleet()
    ordered = [await fleet.order(s("same")) for _ in range(100)]
    for node in ("node-0", "node-1"):
        fleet.answer(node, s("same"))
    await ended(*(waiting for _, waiting in ordered))
    assert sum(told.looks for told, _ in ordered) == 102
    assert all(waiting.result().taken for _, waiting in ordered), "stores' answers are for all of them"
    assert not len(fleet.waits)


async def test_a_store_that_leaves_ends_the_wait_of_those_who_wait_for_it_alone() -> None:
    fleet = Fleet()
    _, waiting = await fleet.order(s("a"))
    _, longer = await fleet.order(s("b"))
    fleet.answer("node-0", s("a"))
    fleet.answer("node-1", s("b"))
    fleet.leave("node-1")
    await ended(waiting)
    assert not longer.done()
    fleet.leave("node-0")
    await ended(longer)
    assert not len(fleet.waits)


async def test_while_nobody_has_taken_an_erasure_it_waits_for_a_store_that_may_come_back() -> None:
    fleet = Fleet()
    _, waiting = await fleet.order(s("a"))
    fleet.answer("node-0", s("a"), REFUSED)
    fleet.leave("node-1")
    await asyncio.sleep(0.01)
    assert not waiting.done()
    fleet.connected.add("node-1")
    fleet.answer("node-1", s("a"))
    await ended(waiting)


async def test_a_wait_that_nobody_answers_ends_in_time_and_is_forgotten() -> None:
    fleet = Fleet()
    _, short = await fleet.order(s("a"), timeout_s=0.01)
    _, longer = await fleet.order(s("a"))
    await ended(short)
    assert s("a") in fleet.waits and not longer.done() and not short.result().taken
    longer.cancel()
    await asyncio.wait([longer])
    assert not len(fleet.waits)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    await made.start()
    yield made
    await made.close()


async def test_an_erasure_is_answered_without_a_store_that_leaves_meanwhile(world: World) -> None:
    call = world.stub.EraseSession(scheduler_pb2.EraseSessionRequest(session=key("s")))
    for node in world.nodes:
        await node.command("erase")
    world.nodes[0].erased("s")
    erasure = world.service.control.erasures.get(SessionKey("t", "s"))
    await world.until(lambda: erasure is not None and "node-0" in erasure.words)
    world.nodes[1].die()
    reply = await asyncio.wait_for(call, 5.0)
    assert [(n.node, n.answered) for n in reply.erasures] == [("node-0", True), ("node-1", False)]
    assert reply.taken and not reply.verified


async def test_a_store_that_comes_back_in_time_answers_the_erasure_that_nobody_else_has_taken(world: World) -> None:
    call = world.stub.EraseSession(scheduler_pb2.EraseSessionRequest(session=key("s")))
    for node in world.nodes:
        await node.command("erase")
        node.die()
    await world.until(lambda: not world.service.reports.stores)
    for name in ("node-0", "node-1"):
        node = FakeNode(world.stub, name)
        assert (await node.command("erase")).session_id == "s"
        node.erased("s")
    reply = await asyncio.wait_for(call, 5.0)
    assert reply.taken and not len(world.service.reports.erasure_waits)


async def test_two_erasures_of_one_session_at_once_are_both_answered(world: World) -> None:
    request = scheduler_pb2.EraseSessionRequest(session=key("s"))
    calls = [world.stub.EraseSession(request) for _ in range(2)]
    for node in world.nodes:
        for _ in calls:
            await node.command("erase")
    for node in world.nodes:
        node.erased("s")
    for reply in await asyncio.wait_for(asyncio.gather(*calls), 5.0):
        assert reply.taken and reply.verified
