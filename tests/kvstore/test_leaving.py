"""A store that leaves the fleet for good, and one that was given up as lost: real stores, a real S3 server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import obstore
import pytest

from contracts.exits import LEFT
from contracts.ids import SessionKey
from kvstore.members import Members
from kvstore.tiers.manifests import gone_path, object_name
from kvstore.tiers.objects import Objects, open_store
from kvstore.tiers.tombstones import TombstoneTier, confirmed_by_all
from tests.blob_servers import rclone_s3
from tests.faults.s3_proxy import proxied
from tests.kvstore.fake_scheduler import FakeScheduler
from tests.kvstore.fake_worker import FakeWorker, make_chunks, make_manifest, make_shape, until
from tests.kvstore.tier_harness import KEYS

SHAPE = make_shape()
SESSION = SessionKey("default", "s")


@pytest.fixture
def away(tmp_path: Path, make_stack) -> Iterator[SimpleNamespace]:
    """Two stores whose blob tier lies behind a proxy that can refuse, and the tier past the proxy."""
    with contextlib.ExitStack() as held:
        server = held.enter_context(rclone_s3(tmp_path / "s3"))
        proxy = held.enter_context(proxied(server.port))
        through = server.through(proxy.port)
        stack = make_stack(blob_url=through.url, blob_options=through.options, orphan_grace_s=1)
        store = open_store(server.url, server.options, Path("unused"))
        yield SimpleNamespace(stack=stack, proxy=proxy, store=store)


async def names_in(store) -> set[str]:
    return {item["path"] async for batch in obstore.list(store) for item in batch}


async def test_a_leaving_store_waits_for_the_blob_tier_and_leaves_nothing_behind(away) -> None:
    stack, chunks = away.stack, make_chunks(SHAPE, 3, 1)
    directory = stack.config.node(0).directory
    async with FakeScheduler(stack.config.scheduler_addresses[0]) as scheduler:
        stack.start(0)
        await scheduler.wait(lambda s: "node-0" in s.held)
        away.proxy.set("refuse")
        async with FakeWorker(stack.address(0), [SHAPE]) as worker:
            await worker.save(SESSION, SHAPE, chunks)
            worker.turn(make_manifest(SESSION, SHAPE, list(chunks)))
            await until(lambda: len([p for p in stack.config.node(0).ssd.rglob("*") if p.is_file()]) == len(chunks))
        await scheduler.tell("node-0", leave=True)
        await scheduler.wait(lambda s: s.leaving.get("node-0") and s.leaving["node-0"][-1].waits_for)
        assert "blob tier" in scheduler.leaving["node-0"][-1].waits_for
        assert not any(said.over for said in scheduler.leaving["node-0"]) and stack.processes[0].poll() is None
        away.proxy.heal()
        await scheduler.wait(lambda s: s.leaving["node-0"][-1].over)
        assert await asyncio.to_thread(stack.processes[0].wait, 30) == LEFT
    names = await names_in(away.store)
    assert all(any(key.hex() in name for name in names) for key in chunks)
    assert any(name.endswith("manifests/default/s") for name in names) and gone_path("node-0") in names
    assert {entry.name for entry in os.scandir(directory)} == {"lock"}


async def test_what_a_node_that_was_declared_lost_brings_back_is_deleted_and_not_served(away) -> None:
    stack, chunks = away.stack, make_chunks(SHAPE, 3, 1)
    ssd = stack.config.node(1).ssd
    async with FakeScheduler(stack.config.scheduler_addresses[0]) as scheduler:
        stack.start(0)
        stack.start(1)
        async with FakeWorker(stack.address(1), [SHAPE]) as worker:
            await worker.save(SESSION, SHAPE, chunks)
            worker.turn(make_manifest(SESSION, SHAPE, list(chunks)))
            assert (await worker.flush()).complete
        stack.signal(1, signal.SIGKILL)
        assert len([p for p in ssd.rglob("*") if p.is_file()]) == len(chunks)
        await scheduler.tell("node-0", peers={"members": ["node-0"], "gone": ["node-1"]})
        async with asyncio.timeout(30):
            while gone_path("node-1") not in await names_in(away.store):  # noqa: ASYNC110 - the store tells nobody
                await asyncio.sleep(0.1)
        stack.start(1)
        await until(lambda: not [p for p in ssd.rglob("*") if p.is_file()])
        await until(lambda: "this node had left the fleet" in stack.log(1))
        async with asyncio.timeout(30):
            while gone_path("node-1") in await names_in(away.store):  # noqa: ASYNC110 - the store tells nobody
                await asyncio.sleep(0.1)


async def test_only_a_signed_object_says_that_a_node_is_gone(tmp_path: Path) -> None:
    objects = Objects(open_store("", {}, tmp_path))
    tier = TombstoneTier(objects, KEYS)
    assert await tier.is_gone("node-1") is False
    assert await tier.put_gone("node-1")
    assert await tier.list_gone() == {object_name("node-1")} and await tier.is_gone("node-2") is False
    signed = await objects.get(gone_path("node-1"))
    await objects.put(None, gone_path("node-2"), signed)  # another node's
    await objects.put(None, gone_path("node-3"), b"gone")
    assert await tier.list_gone() == {object_name("node-1")}
    assert await tier.back("node-1") and await tier.list_gone() == frozenset()


def test_a_tombstone_waits_for_members_and_for_whoever_confirmed_before_but_not_for_who_is_gone() -> None:
    paths, said = ["t/a"], {"node-0": frozenset({"a"}), "node-7": frozenset[str]()}
    assert confirmed_by_all(paths, said, ["node-0"]) == []
    assert confirmed_by_all(paths, said, ["node-0"], gone=["node-7"]) == paths
    assert confirmed_by_all(paths, said, ["node-0", "node-1"], gone=["node-7"]) == []


def test_a_node_waits_for_whom_any_scheduler_names(tmp_path: Path) -> None:
    members = Members("node-0", ["node-0", "node-1"], tmp_path)
    assert members.deployment == {"node-0", "node-1"} and not members.alone
    members.told("first", ["node-0", "node-2"], [])
    assert members.deployment == {"node-0", "node-2"}
    members.told("second", ["node-0", "node-1", "node-2"], [])
    members.told("first", ["node-0"], gone=["node-2"])
    assert members.deployment == {"node-0", "node-1", "node-2"} and members.gone == {"node-2"}
    members.told("second", [], [])
    assert members.deployment == {"node-0", "node-1", "node-2"}, "an empty list changes nothing"
    members.told("first", ["node-0", "node-2"], [])
    assert not members.gone, "it has joined again"


def test_the_only_node_is_alone_until_it_has_met_another(tmp_path: Path) -> None:
    members = Members("node-0", ["node-0"], tmp_path)
    members.told("first", ["node-0"], [])
    assert members.alone
    members.told("first", ["node-0", "node-1"], [])
    assert not Members("node-0", ["node-0"], tmp_path).alone
    assert not Members("node-3", ["node-3"], tmp_path).alone, "it has joined others"
