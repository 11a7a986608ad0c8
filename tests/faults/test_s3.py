"""A faulty object store: no wrong byte, no load that hangs, no save that fails, and all is well again once the store
is.

Real S3 servers behind `s3_proxy`: rclone's, which answers every range with the whole object, and moto's, which answers
ranges.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import obstore
import pytest

from contracts.ids import SessionKey
from kvstore.tiers.objects import open_store
from tests.blob_servers import BlobServer, moto_s3, rclone_s3
from tests.faults.s3_proxy import S3Proxy, proxied
from tests.kvstore.conftest import make_stack
from tests.kvstore.fake_scheduler import FakeScheduler, wire_session
from tests.kvstore.fake_worker import FakeWorker, Loaded, make_chunks, make_manifest, make_shape
from tests.kvstore.store_metrics import until_nothing_is_held

__all__ = ["make_stack"]
pytestmark = [pytest.mark.faults, pytest.mark.timeout(280)]

SHAPE = make_shape()
SESSION, NEWER = SessionKey("default", "s"), SessionKey("default", "newer")
#: A load is answered within this time, whatever the store does: an answer that says "nothing" counts.
LOAD_S = 20.0
#: When the store is well again, this node knows it within this time.
WELL_S = 90.0
READ_FAULTS = ["503", "hang", "truncate", "short", "long", "trickle", "reset", "refuse"]
WRITE_FAULTS = ["503", "hang", "reset", "refuse", "lost answer"]


@pytest.fixture(params=["rclone", "moto"])
def faulty(request: pytest.FixtureRequest, tmp_path: Path, make_stack) -> Iterator[SimpleNamespace]:
    """A node whose blob tier lies behind a proxy: `stack`, `proxy`, `server`, and `store`, which goes past the
    proxy."""
    with contextlib.ExitStack() as held:
        server = held.enter_context(rclone_s3(tmp_path / "s3") if request.param == "rclone" else moto_s3())
        proxy = held.enter_context(proxied(server.port))
        yield _faulty(server, proxy, make_stack)


def _faulty(server: BlobServer, proxy: S3Proxy, make_stack) -> SimpleNamespace:
    through = server.through(proxy.port)
    stack = make_stack(blob_url=through.url, blob_options=through.options)
    store = open_store(server.url, server.options, Path("unused"))
    return SimpleNamespace(stack=stack, proxy=proxy, server=server, store=store)


def assert_true(loaded: Loaded, chunks: dict[bytes, list[bytes]]) -> None:
    """Whatever came is right, and what is said to be usable came."""
    values = list(chunks.values())
    for (i, layer), piece in loaded.pieces.items():
        assert piece == values[i][layer], (i, layer)
    assert all((i, layer) in loaded.pieces for i in range(loaded.usable) for layer in range(SHAPE.layers))


#: What the bucket has of sessions, beside tombstones, and notes of whose it is and who was here.
OF_SESSIONS = ("chunks/", "manifests/", "keys/")


async def names_in(store) -> set[str]:
    found = {item["path"] async for batch in obstore.list(store) for item in batch}
    return {name for name in found if name.startswith(OF_SESSIONS)}


async def wiped(stack) -> None:
    """The node starts anew with nothing in DRAM and on the SSD."""
    stack.signal(0, signal.SIGTERM)
    shutil.rmtree(stack.config.node(0).ssd)
    stack.start(0)


async def save(
    worker: FakeWorker, session: SessionKey, chunks: dict[bytes, list[bytes]], last_use_s: float = 1.0
) -> None:
    grant = await worker.save(session, SHAPE, chunks)
    assert not grant.refused
    worker.turn(make_manifest(session, SHAPE, list(chunks), last_use_s))


async def load_all_again(worker: FakeWorker, session: SessionKey, chunks: dict[bytes, list[bytes]]) -> None:
    """The store is well: within a time everything comes."""
    async with asyncio.timeout(WELL_S):
        while True:
            loaded = await worker.load(SHAPE, list(chunks), session=session, limit_s=LOAD_S)
            assert_true(loaded, chunks)
            if loaded.usable == len(chunks):
                return
            await asyncio.sleep(0.5)


@pytest.mark.parametrize("fault", READ_FAULTS)
async def test_reads_that_fail_are_misses_in_bounded_time_and_nothing_is_lost(faulty, fault):
    stack, chunks, fresh = faulty.stack, make_chunks(SHAPE, 8), make_chunks(SHAPE, 4, 1)
    stack.start(0)
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        await save(worker, SESSION, chunks)
        assert (await worker.flush()).complete
    before = await names_in(faulty.store)
    assert len(before) == len(chunks) + 1
    await wiped(stack)
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        faulty.proxy.set(fault, "reads", "lists")
        for _ in range(3):
            loaded = await worker.load(SHAPE, list(chunks), session=SESSION, limit_s=LOAD_S)
            assert_true(loaded, chunks)
        assert fault == "refuse" or faulty.proxy.faults_met()
        await save(worker, NEWER, fresh)
        loaded = await worker.load(SHAPE, list(fresh), session=NEWER, limit_s=LOAD_S)
        assert loaded.usable == len(fresh)
        assert_true(loaded, fresh)
        faulty.proxy.heal()
        await load_all_again(worker, SESSION, chunks)
        await until_nothing_is_held(stack.address(0))
    assert before <= await names_in(faulty.store), "what was only not read is not deleted"


@pytest.mark.parametrize("when", ["while it reads", "from the start"])
@pytest.mark.parametrize("fault", ["hang", "reset", "truncate"])
async def test_a_store_that_fails_in_the_middle_of_a_load(faulty, fault, when):
    stack, chunks = faulty.stack, make_chunks(SHAPE, 30)
    stack.start(0)
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        await save(worker, SESSION, chunks)
        assert (await worker.flush()).complete
    if when == "from the start":
        faulty.proxy.set(fault)
    await wiped(stack)
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        loading = asyncio.ensure_future(worker.load(SHAPE, list(chunks), session=SESSION, limit_s=LOAD_S))
        await asyncio.sleep(0.05)
        faulty.proxy.set(fault)
        assert_true(await loading, chunks)
        faulty.proxy.heal()
        await load_all_again(worker, SESSION, chunks)
        await until_nothing_is_held(stack.address(0))


@pytest.mark.parametrize("fault", WRITE_FAULTS)
async def test_writes_that_fail_hold_nobody_up_and_are_made_up_for(faulty, fault):
    stack, chunks = faulty.stack, make_chunks(SHAPE, 8)
    stack.start(0)
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        faulty.proxy.set(fault, "writes")
        await save(worker, SESSION, chunks)
        loaded = await worker.load(SHAPE, list(chunks), session=SESSION, limit_s=LOAD_S)
        assert loaded.usable == len(chunks)
        assert_true(loaded, chunks)
        await worker.flush(8.0)
        for turn in range(3):
            more = make_chunks(SHAPE, 4, 10 + turn)
            await save(worker, NEWER, more, 2.0 + turn)
            assert_true(await worker.load(SHAPE, list(more), session=NEWER, limit_s=LOAD_S), more)
        faulty.proxy.heal()
        owed = {key.hex() for key in (*chunks, *more)} | {SESSION.session_id, NEWER.session_id}
        async with asyncio.timeout(WELL_S):
            while not owed <= {name.rpartition("/")[2] for name in await names_in(faulty.store)}:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.5)
    await wiped(stack)
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        await load_all_again(worker, SESSION, chunks)
        await load_all_again(worker, NEWER, more)


# ---- an older store answers


@pytest.fixture
def stale(tmp_path: Path, make_stack) -> Iterator[SimpleNamespace]:
    """As `faulty`; `remember()` keeps what the store holds now, for the fault "stale" to answer with."""
    with contextlib.ExitStack() as held:
        now, then = tmp_path / "now", tmp_path / "then"
        server = held.enter_context(rclone_s3(now))
        old = held.enter_context(rclone_s3(then))
        made = _faulty(server, held.enter_context(proxied(server.port, old.port)), make_stack)
        made.remember = lambda: shutil.copytree(now / "bucket", then / "bucket", dirs_exist_ok=True)
        yield made


async def test_stale_manifests_lists_and_missing_objects_cost_only_time(stale):
    stack, chunks = stale.stack, make_chunks(SHAPE, 8)
    early = dict(list(chunks.items())[:3])
    stack.start(0)
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        await save(worker, SESSION, early, 1.0)
        assert (await worker.flush()).complete
        stale.remember()
        await save(worker, SESSION, chunks, 2.0)
        assert (await worker.flush()).complete
    before = await names_in(stale.store)
    stale.proxy.set("stale", "reads", "lists")
    await wiped(stack)
    async with (
        FakeScheduler(stack.config.scheduler_addresses[0]) as scheduler,
        FakeWorker(stack.address(0), [SHAPE]) as worker,
    ):
        await scheduler.advise("node-0", "s")
        offer = await asyncio.wait_for(worker.offers.get(), LOAD_S)
        assert list(offer.keys) == list(early), "the old manifest is an older truth, and no more"
        loaded = await worker.load(SHAPE, list(chunks), session=SESSION, limit_s=LOAD_S)
        assert loaded.usable == len(early)
        assert_true(loaded, chunks)
        stale.proxy.heal()
        await load_all_again(worker, SESSION, chunks)
    assert before <= await names_in(stale.store), "an object that one answer lacked is not deleted"


async def test_an_object_that_was_there_when_probed_and_is_not_when_read_is_a_miss_and_is_not_deleted(stale):
    stack, chunks = stale.stack, make_chunks(SHAPE, 40)
    stack.start(0)
    stale.remember()  # nothing
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        await save(worker, SESSION, chunks)
        assert (await worker.flush()).complete
    before = await names_in(stale.store)
    await wiped(stack)
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        first = await worker.load(SHAPE, list(chunks)[:1], session=SESSION, limit_s=LOAD_S)
        assert_true(first, chunks)
        await worker.residency(SESSION)  # every header is known now
        stale.proxy.set("stale", "reads", "lists")
        loaded = await worker.load(SHAPE, list(chunks), session=SESSION, limit_s=LOAD_S)
        assert_true(loaded, chunks)
        assert loaded.usable < len(chunks)
        stale.proxy.heal()
        await load_all_again(worker, SESSION, chunks)
        assert before <= await names_in(stale.store)


async def test_a_stale_list_does_not_bring_an_erased_session_back(stale):
    stack, chunks = stale.stack, make_chunks(SHAPE, 4)
    async with FakeScheduler(stack.config.scheduler_addresses[0]) as scheduler:
        stack.start(0)
        async with FakeWorker(stack.address(0), [SHAPE]) as worker:
            await save(worker, SESSION, chunks)
            assert (await worker.flush()).complete
            stale.remember()
            await scheduler.tell("node-0", erase=wire_session("s"))
            assert set(await asyncio.wait_for(worker.erased.get(), LOAD_S)) == set(chunks)
            assert (await worker.flush()).complete
            stale.proxy.set("stale", "reads", "lists")
            # Erasing another one reads all manifests, the stale one among them.
            await scheduler.tell("node-0", erase=wire_session("unknown"))
            await asyncio.sleep(1.0)
            stale.proxy.heal()
            assert not (await worker.residency(SESSION)).known
            assert await names_in(stale.store) == set()


async def test_while_sessions_cannot_be_listed_none_expires_and_when_they_can_the_idle_one_does(tmp_path, make_stack):
    """A node that cannot list sessions does not know who uses what. A session that another node's clock puts into the
    future stays."""
    with rclone_s3(tmp_path / "s3") as server, proxied(server.port) as proxy:
        through = server.through(proxy.port)
        stack = make_stack(blob_url=through.url, blob_options=through.options, blob_expiry_s=3)
        store = open_store(server.url, server.options, Path("unused"))
        proxy.set("503", "lists")
        stack.start(0)
        old, ahead = make_chunks(SHAPE, 2, 1), make_chunks(SHAPE, 2, 2)
        async with FakeWorker(stack.address(0), [SHAPE]) as worker:
            await save(worker, SESSION, old)
            await save(worker, NEWER, ahead, last_use_s=4e9)
            assert (await worker.flush()).complete
            before, refused = await names_in(store), proxy.seen["lists", "503"]
            async with asyncio.timeout(WELL_S):  # rounds of expiry, one a second, that see nothing
                while proxy.seen["lists", "503"] < refused + 5:  # noqa: ASYNC110 - no event tells of the store's requests
                    await asyncio.sleep(0.2)
            assert before <= await names_in(store)
            assert (await worker.load(SHAPE, list(old), session=SESSION)).usable == len(old)
            proxy.heal()
            async with asyncio.timeout(WELL_S):
                while any(key.hex() in name for name in await names_in(store) for key in old):  # noqa: ASYNC110
                    await asyncio.sleep(0.2)
            assert {key.hex() for key in ahead} <= {name.rsplit("/", 1)[-1] for name in await names_in(store)}
