"""An erasure that the blob tier did not hear of survives the store's death: real stores, a real S3 server that goes
away and comes back."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import obstore
import pytest

from contracts.ids import SessionKey
from kvstore.tiers.manifests import confirmed_path
from kvstore.tiers.objects import open_store
from kvstore.tiers.owner import OBJECT
from tests.blob_servers import rclone_s3
from tests.faults.s3_proxy import proxied
from tests.kvstore.fake_scheduler import FakeScheduler, wire_session
from tests.kvstore.fake_worker import FakeWorker, make_chunks, make_manifest, make_shape, until

SHAPE = make_shape()
GONE, OTHER = SessionKey("default", "gone"), SessionKey("default", "other")


@pytest.fixture
def away(tmp_path: Path, make_stack) -> Iterator[SimpleNamespace]:
    """Two stores whose blob tier lies behind a proxy that can refuse: `stack`, `proxy`, and `store`, which goes past
    the proxy."""
    with contextlib.ExitStack() as held:
        server = held.enter_context(rclone_s3(tmp_path / "s3"))
        proxy = held.enter_context(proxied(server.port))
        through = server.through(proxy.port)
        stack = make_stack(blob_url=through.url, blob_options=through.options, orphan_grace_s=1)
        store = open_store(server.url, server.options, Path("unused"))
        yield SimpleNamespace(stack=stack, proxy=proxy, server=server, store=store)


async def names_in(store) -> set[str]:
    return {item["path"] async for batch in obstore.list(store) for item in batch}


async def saved(worker: FakeWorker, session: SessionKey, chunks: dict[bytes, list[bytes]]) -> None:
    while (await worker.save(session, SHAPE, chunks)).refused:  # noqa: ASYNC110 - until the worker has heard of the erasure
        await asyncio.sleep(0.05)
    worker.turn(make_manifest(session, SHAPE, list(chunks)))
    assert (await worker.flush()).complete


async def test_what_is_erased_while_the_blob_tier_is_away_stays_erased_through_a_kill(away) -> None:
    stack, chunks, kept = away.stack, make_chunks(SHAPE, 3, 1), make_chunks(SHAPE, 2, 2)
    async with FakeScheduler(stack.config.scheduler_addresses[0]) as scheduler:
        stack.start(0)
        async with FakeWorker(stack.address(0), [SHAPE]) as worker:
            await saved(worker, GONE, chunks)
            await saved(worker, OTHER, kept)
            away.proxy.set("refuse")
            await scheduler.tell("node-0", erase=wire_session("gone"))
            await scheduler.wait(lambda s: s.erased.get("node-0"))
            assert not scheduler.erased["node-0"][-1].verified
        stack.signal(0, signal.SIGKILL)
        away.proxy.heal()
        stack.start(0)
        async with FakeWorker(stack.address(0), [SHAPE]) as worker:
            for _ in range(20):
                assert (await worker.load(SHAPE, list(chunks), session=GONE)).usable == 0
                assert not (await worker.residency(GONE)).known
                await asyncio.sleep(0.02)
            await scheduler.wait(lambda s: s.erased["node-0"][-1].verified)
            assert (await worker.load(SHAPE, list(kept), session=OTHER)).usable == 2
        names = await names_in(away.store)
        assert not any(key.hex() in name for name in names for key in chunks) and not any(
            n.endswith("manifests/default/gone") for n in names
        )


@pytest.mark.faults
@pytest.mark.timeout(120)
async def test_a_node_that_was_down_serves_nothing_of_its_ssd_until_it_knows_what_was_erased_and_keeps_what_is_new(
    away,
) -> None:
    stack, chunks, anew = away.stack, make_chunks(SHAPE, 3, 1), make_chunks(SHAPE, 2, 3)
    async with FakeScheduler(stack.config.scheduler_addresses[0]) as scheduler:
        for node in (1, 0):
            stack.start(node)
            async with FakeWorker(stack.address(node), [SHAPE]) as worker:
                await saved(worker, GONE, chunks)
        files = {p.name for p in stack.config.node(1).ssd.rglob("*") if p.is_file()}
        assert files == {key.hex() for key in chunks}
        stack.signal(1, signal.SIGKILL)
        away.proxy.set("refuse")
        await scheduler.tell("node-0", erase=wire_session("gone"))
        await scheduler.wait(lambda s: s.erased.get("node-0"))
        stack.start(1)
        async with FakeWorker(stack.address(1), [SHAPE]) as worker:
            assert (await worker.load(SHAPE, list(chunks), session=GONE)).usable == 0
        stack.signal(0, signal.SIGKILL)
        stack.start(0)
        away.proxy.heal()
        await scheduler.wait(lambda s: s.erased["node-0"][-1].verified)
        await until(lambda: not [p for p in stack.config.node(1).ssd.rglob("*") if p.is_file()])
        async with FakeWorker(stack.address(0), [SHAPE]) as worker:
            await saved(worker, GONE, anew)
        async with asyncio.timeout(30):
            while any("tombstones/" in name for name in await names_in(away.store)):  # noqa: ASYNC110 - the store tells nobody
                await asyncio.sleep(0.1)
        for node in (0, 1):
            stack.signal(node, signal.SIGKILL)
            stack.start(node)
        async with FakeWorker(stack.address(0), [SHAPE]) as worker, FakeWorker(stack.address(1), [SHAPE]) as other:
            assert (await worker.load(SHAPE, list(anew), session=GONE)).usable == 2
            assert (await worker.residency(GONE)).known and (await other.residency(GONE)).known
            assert (await other.load(SHAPE, list(chunks), session=GONE)).usable == 0


async def test_erasing_what_nobody_knows_leaves_nothing(away) -> None:
    stack = away.stack
    async with FakeScheduler(stack.config.scheduler_addresses[0]) as scheduler:
        stack.start(0)
        for name in ("a", "b"):
            await scheduler.tell("node-0", erase=wire_session(name))
        await scheduler.wait(lambda s: len(s.erased.get("node-0", ())) == 2)
        assert all(e.verified and not e.known for e in scheduler.erased["node-0"])
        assert await names_in(away.store) - {confirmed_path("node-0")} == {OBJECT}
        journal = stack.config.node(0).ssd.parent / "erasures.journal"
        assert not journal.exists() or b"session" not in journal.read_bytes()
