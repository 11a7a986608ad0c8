"""An erasure that the blob tier did not hear of survives the store's death: real stores, a real S3 server that goes away and comes back."""

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
from kvstore.tiers.objects import open_store
from tests.blob_servers import rclone_s3
from tests.faults.s3_proxy import proxied
from tests.kvstore.fake_scheduler import FakeScheduler, wire_session
from tests.kvstore.fake_worker import FakeWorker, make_chunks, make_manifest, make_shape

SHAPE = make_shape()
GONE, OTHER = SessionKey("default", "gone"), SessionKey("default", "other")


@pytest.fixture
def away(tmp_path: Path, make_stack) -> Iterator[SimpleNamespace]:
    """Two stores whose blob tier lies behind a proxy that can refuse: `stack`, `proxy`, and `store`, which goes past the proxy."""
    with contextlib.ExitStack() as held:
        server = held.enter_context(rclone_s3(tmp_path / "s3"))
        proxy = held.enter_context(proxied(server.port))
        through = server.through(proxy.port)
        stack = make_stack(blob_url=through.url, blob_options=through.options)
        store = open_store(server.url, server.options, Path("unused"))
        yield SimpleNamespace(stack=stack, proxy=proxy, server=server, store=store)


async def names_in(store) -> set[str]:
    return {item["path"] async for batch in obstore.list(store) for item in batch}


async def saved(worker: FakeWorker, session: SessionKey, chunks: dict[bytes, list[bytes]]) -> None:
    await worker.save(session, SHAPE, chunks)
    worker.turn(make_manifest(session, SHAPE, list(chunks)))
    assert (await worker.flush()).complete


async def test_what_is_erased_while_the_blob_tier_is_away_stays_erased_through_a_kill(away) -> None:
    stack, chunks, kept = away.stack, make_chunks(SHAPE, 3, 1), make_chunks(SHAPE, 2, 2)
    async with FakeScheduler(stack.config.scheduler_address) as scheduler:
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
