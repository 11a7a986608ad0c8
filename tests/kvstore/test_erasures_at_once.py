"""Many erasures at once, on a fake node: what they cost the blob tier, and that each still learns what it must."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from contracts.ids import SessionKey
from contracts.kv import Manifest
from kvstore import erasing
from kvstore.core import events as ev
from kvstore.erasing import Answer, Erasing
from runtime.clock import RealClock
from runtime.service import Tasks
from tests.kvstore.fake_worker import until


class FakeBlob:
    """A blob tier that has every session but `missing`. `open` lets listings go on, `answers` the questions."""

    def __init__(self) -> None:
        self.open, self.answers = asyncio.Event(), asyncio.Event()
        self.answers.set()
        self.missing: set[SessionKey] = set()
        self.silent_s = 0.0  #: questions remain without an answer for so long
        self.begun = self.running = self.cancelled = self.most_running = 0
        self.asked = self.asking = self.most_asking = 0
        self.written: list[Manifest] = []
        self.tombstones = self

    async def manifests(self) -> AsyncIterator[list[Manifest]]:
        self.begun += 1
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        page = list(self.written)
        try:
            await self.open.wait()
            yield page
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def find_manifest(self, session: SessionKey) -> Manifest | ev.Fault:
        self.asked += 1
        self.asking += 1
        self.most_asking = max(self.most_asking, self.asking)
        await self.answers.wait()
        await asyncio.sleep(self.silent_s)
        self.asking -= 1
        if self.silent_s:
            return ev.Fault.UNAVAILABLE
        return ev.Fault.MISSING if session in self.missing else manifest(session)

    async def find(self, session: SessionKey) -> list[Any]:
        return []


class FakeNode:
    """What `Erasing` needs of a node. It forgets an erased session at once, so that erasures end. `known` has each
    erased session's listed sessions at that time, and `blind` the sessions erased without blob's word."""

    def __init__(self, tmp_path) -> None:
        self.clock, self.blob, self.name = RealClock(), FakeBlob(), "node-0"
        self.places = SimpleNamespace(ssd=tmp_path / "ssd")
        graves = SimpleNamespace(get=lambda session: None, number=lambda session: 0)
        self.store = SimpleNamespace(
            meter=SimpleNamespace(admits=lambda tier: True),
            index=SimpleNamespace(manifests={}, claims={}),
            erasure=SimpleNamespace(graves=graves, is_erasing=lambda session: False),
        )
        self.older = self
        self.listed: set[SessionKey] = set()
        self.known: dict[SessionKey, set[SessionKey]] = {}
        self.blind: set[SessionKey] = set()

    async def erase(self, session: SessionKey, chunks: dict[bytes, bytes]) -> bool:
        return True

    def handle(self, event: ev.Event) -> None:
        if isinstance(event, ev.ManifestsListed):
            self.listed |= {m.session for m in event.manifests}
        elif isinstance(event, ev.SessionErased):
            self.known[event.session] = set(self.listed)
            if event.blind:
                self.blind.add(event.session)


class World:
    """Erasures on the fake node."""

    def __init__(self, tmp_path) -> None:
        self.node = FakeNode(tmp_path)
        self.blob = self.node.blob
        self.tasks = Tasks()
        self.erasing = Erasing(self.node, self.tasks)  # type: ignore[arg-type]
        self.answers: list[Answer] = []
        self.erasing.answered.append(self.answers.append)

    def order(self, *names: str) -> None:
        for name in names:
            self.tasks.start(self.erasing.erase(session(name)), "erase")

    async def answered(self, count: int) -> None:
        await until(lambda: len(self.answers) == count)


def session(name: str) -> SessionKey:
    return SessionKey("t", name)


def manifest(of: SessionKey) -> Manifest:
    return Manifest(of, "m", b"f" * 32, [], 0, 1.0)


@pytest.fixture
async def world(tmp_path):
    made = World(tmp_path)
    yield made
    await made.tasks.cancel()
    made.erasing.close()


MANY = [f"s{n}" for n in range(50)]


async def test_erasures_that_arrive_while_sessions_are_listed_share_the_next_listing(world: World) -> None:
    world.order("first")
    await until(lambda: world.blob.begun == 1)
    world.order(*MANY)
    await until(lambda: world.blob.asked == 51)
    await asyncio.sleep(0.05)
    assert world.blob.begun == 1, "the next waits for the one that runs"
    world.blob.open.set()
    await world.answered(51)
    assert world.blob.begun == 2 and world.blob.most_running == 1


async def test_an_erasure_learns_a_session_that_was_written_after_the_running_listing_began(world: World) -> None:
    world.order("first")
    await until(lambda: world.blob.begun == 1)
    world.blob.written.append(manifest(session("new")))
    world.order("second")
    await until(lambda: world.blob.asked == 2)
    world.blob.open.set()
    await world.answered(2)
    assert world.node.known[session("second")] == {session("new")}


async def test_erasing_what_nobody_knows_lists_nothing(world: World) -> None:
    world.blob.missing = {session(name) for name in MANY}
    world.order(*MANY)
    await world.answered(50)
    assert not any(answer.known for answer in world.answers)
    assert world.blob.begun == 0 and not world.node.known


async def test_no_erasure_waits_longer_for_a_listing_and_one_that_nobody_awaits_ends(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(erasing, "_LIST_S", 0.2)
    begun = world.node.clock.now()
    world.order("first")
    await until(lambda: world.blob.begun == 1)
    world.order(*MANY)
    await world.answered(51)
    assert world.node.clock.now() - begun < 2.0
    await until(lambda: world.blob.running == 0)
    assert world.blob.cancelled == world.blob.begun <= 2
    world.blob.open.set()
    world.order("later")
    await world.answered(52)
    assert world.blob.cancelled == world.blob.begun - 1, "the last one was read to its end"


async def test_one_of_those_who_share_a_listing_may_go_without_ending_it(world: World) -> None:
    listings = world.erasing._listings
    one, other = (asyncio.ensure_future(listings.learn()) for _ in range(2))
    await until(lambda: world.blob.begun == 1)
    one.cancel()
    await asyncio.wait([one])
    world.blob.open.set()
    await other
    assert (world.blob.begun, world.blob.cancelled) == (1, 0)


async def test_few_erasures_ask_the_blob_tier_at_a_time(world: World) -> None:
    world.blob.missing = {session(name) for name in MANY}
    world.blob.answers.clear()
    world.order(*MANY)
    await until(lambda: world.blob.asking > 0)
    await asyncio.sleep(0.05)
    world.blob.answers.set()
    await world.answered(50)
    assert world.blob.most_asking == erasing._ASKING < len(MANY)


async def test_erasures_that_wait_for_their_turn_do_not_ask_a_tier_that_was_silent_meanwhile(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(erasing, "PATIENT_S", 0.1)
    world.blob.silent_s = 0.2
    world.blob.open.set()
    world.order(*MANY)
    await world.answered(50)
    assert world.blob.asked == erasing._ASKING and world.node.blind == {session(name) for name in MANY}
