"""Sessions end to end in one or two real stores: reports, hints, invalidation, erasure, residency."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from contracts.ids import SessionKey
from contracts.v1 import kvstore_pb2 as pb
from tests.kvstore.fake_scheduler import FakeScheduler, wire_session
from tests.kvstore.fake_worker import LIMIT_S, FakeWorker, assert_pieces, make_chunks, make_manifest, make_shape, until

SHAPE = make_shape()


def session(name: str) -> SessionKey:
    return SessionKey("default", name)


def chunk_files(folder: Path) -> set[str]:
    return {p.name for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("transport", ["nixl", "socket"])
async def test_a_hint_brings_a_session_from_the_other_node_before_anything_asks_for_it(make_stack, transport):
    stack = make_stack(transport=transport)
    chunks = make_chunks(SHAPE, 12)
    async with FakeScheduler(stack.config.scheduler_addresses[0]) as scheduler:
        stack.start(0)
        stack.start(1)
        async with FakeWorker(stack.address(0), [SHAPE]) as first, FakeWorker(stack.address(1), [SHAPE]) as second:
            await first.save(session("s"), SHAPE, chunks)
            first.turn(make_manifest(session("s"), SHAPE, list(chunks)))
            await first.flush()
            await scheduler.wait(lambda s: "s" in s.held.get("node-0", {}))
            assert scheduler.held["node-0"]["s"].tokens_here == 12 * SHAPE.chunk_tokens
            await scheduler.advise("node-1", "s", sources=("node-0",))
            offer = await asyncio.wait_for(second.offers.get(), LIMIT_S)
            assert list(offer.keys) == list(chunks)
            assert 0 <= offer.arrival_s <= 2.0 < offer.expires_s
            assert_pieces(
                await second.load(SHAPE, list(offer.keys), session=session("s"), prefetch=True), SHAPE, chunks
            )
            await second.flush()
            demand = await second.load(SHAPE, list(chunks), session=session("s"), sources=["node-0"])
            assert demand.near
            assert_pieces(demand, SHAPE, chunks)
            await scheduler.wait(lambda s: "s" in s.held.get("node-1", {}))
            assert scheduler.held["node-1"]["s"].tokens_dram == 12 * SHAPE.chunk_tokens


async def test_a_hint_that_comes_before_the_worker_is_offered_when_it_attaches(make_stack):
    stack = make_stack()
    chunks = make_chunks(SHAPE, 4)
    async with FakeScheduler(stack.config.scheduler_addresses[0]) as scheduler:
        stack.start(0)
        async with FakeWorker(stack.address(0), [SHAPE]) as worker:
            await worker.save(session("s"), SHAPE, chunks)
            worker.turn(make_manifest(session("s"), SHAPE, list(chunks)))
            await worker.flush()
        await scheduler.advise("node-0", "s")
        await asyncio.sleep(0.2)
        async with FakeWorker(stack.address(0), [SHAPE]) as worker:
            assert list((await asyncio.wait_for(worker.offers.get(), LIMIT_S)).keys) == list(chunks)


async def test_a_restarted_scheduler_hears_everything_again(make_stack):
    stack = make_stack()
    chunks = make_chunks(SHAPE, 3)
    stack.start(0)
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        await worker.save(session("s"), SHAPE, chunks)
        worker.turn(make_manifest(session("s"), SHAPE, list(chunks)))
        await worker.flush()
        for _ in range(2):
            async with FakeScheduler(stack.config.scheduler_addresses[0]) as scheduler:
                await scheduler.wait(lambda s: "s" in s.held.get("node-0", {}) and "node-0" in s.loads)
                assert scheduler.held["node-0"]["s"].tokens_total == 3 * SHAPE.chunk_tokens
                assert scheduler.loads["node-0"].ssd_bytes_used == 3 * SHAPE.chunk_bytes


async def test_a_restarted_node_reports_the_sessions_that_its_ssd_holds(make_stack):
    stack = make_stack()
    chunks = make_chunks(SHAPE, 3)
    stack.start(0)
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        await worker.save(session("s"), SHAPE, chunks)
        worker.turn(make_manifest(session("s"), SHAPE, list(chunks)))
        await worker.flush()
    stack.signal(0, signal.SIGKILL)
    stack.start(0)
    async with FakeScheduler(stack.config.scheduler_addresses[0]) as scheduler:
        await scheduler.wait(lambda s: "s" in s.held.get("node-0", {}))
        held = scheduler.held["node-0"]["s"]
        assert (held.tokens_here, held.tokens_dram) == (3 * SHAPE.chunk_tokens, 0)


async def test_an_invalidation_reaches_the_worker(make_stack):
    stack = make_stack()
    async with FakeScheduler(stack.config.scheduler_addresses[0]) as scheduler:
        stack.start(0)
        async with FakeWorker(stack.address(0), [SHAPE]) as worker:
            await scheduler.tell("node-0", invalidate=wire_session("s"))
            assert await asyncio.wait_for(worker.invalidated.get(), LIMIT_S) == session("s")


async def test_erasing_a_session_leaves_what_another_one_names_and_nothing_else(make_stack):
    stack = make_stack()
    shared, own, other = make_chunks(SHAPE, 2, 1), make_chunks(SHAPE, 3, 2), make_chunks(SHAPE, 2, 3)
    blob, ssd = stack.config.data / "blob" / "v3", stack.config.node(0).ssd
    async with FakeScheduler(stack.config.scheduler_addresses[0]) as scheduler:
        stack.start(0)
        async with FakeWorker(stack.address(0), [SHAPE]) as worker:
            for name, tail in (("gone", own), ("stays", other)):
                await worker.save(session(name), SHAPE, {**shared, **tail})
                worker.turn(make_manifest(session(name), SHAPE, [*shared, *tail]))
            await worker.flush()
            await scheduler.wait(lambda s: "stays" in s.held.get("node-0", {}))
            await scheduler.tell("node-0", erase=wire_session("gone"))
            assert sorted(await asyncio.wait_for(worker.erased.get(), LIMIT_S)) == sorted(own)
            kept = {k.hex() for k in (*shared, *other)}
            await until(lambda: chunk_files(ssd) == kept)
            await until(lambda: chunk_files(blob / "chunks") == kept)
            await until(lambda: chunk_files(blob / "manifests") == {"stays"})
            assert not (await worker.residency(session("gone"))).known
            assert (await worker.load(SHAPE, list(own))).usable == 0
            assert_pieces(await worker.load(SHAPE, [*shared, *other]), SHAPE, {**shared, **other})


async def test_late_saves_of_an_erased_session_do_not_bring_it_back(make_stack):
    stack = make_stack()
    chunks = make_chunks(SHAPE, 3)
    async with FakeScheduler(stack.config.scheduler_addresses[0]) as scheduler:
        stack.start(0)
        async with FakeWorker(stack.address(0), [SHAPE]) as worker:
            save_id, grant = await worker.grant(session("s"), SHAPE, list(chunks))
            assert list(grant.indices) == [0, 1, 2]
            worker.is_slow = True
            await scheduler.tell("node-0", erase=wire_session("s"))
            await asyncio.wait_for(worker.erased.get(), LIMIT_S)
            worker.send(saved=pb.SaveDone(save_id=save_id, ok=[0, 1, 2]))
            worker.turn(make_manifest(session("s"), SHAPE, list(chunks)))
            worker.is_slow = False
            worker.answer()
            assert (await worker.flush()).complete
            assert (await worker.load(SHAPE, list(chunks))).usable == 0
            assert not chunk_files(stack.config.node(0).ssd)
            assert not chunk_files(stack.config.data / "blob" / "v3" / "chunks") and not chunk_files(
                stack.config.data / "blob" / "v3" / "manifests"
            )


async def test_residency_tells_every_tier(make_stack):
    stack = make_stack()
    chunks = make_chunks(SHAPE, 3)
    stack.start(0)
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        worker.hbm_answer.tokens = 77
        await worker.save(session("s"), SHAPE, chunks)
        worker.turn(make_manifest(session("s"), SHAPE, list(chunks)))
        await worker.flush()
        reply = await worker.residency(session("s"))
        assert reply.known and reply.manifest.tokens == 3 * SHAPE.chunk_tokens
        tiers = {t.tier: t for t in reply.tiers}
        assert tiers["hbm"].tokens == 77
        for tier in ("dram", "ssd", "blob"):
            assert tiers[tier].tokens == 3 * SHAPE.chunk_tokens
            assert list(tiers[tier].layer_chunks) == [3] * SHAPE.layers
            assert tiers[tier].bytes == 3 * SHAPE.chunk_bytes
        assert not (await worker.residency(session("nobody"))).known


async def test_a_quick_look_at_a_session_asks_no_blob_tier(make_stack):
    stack = make_stack()
    chunks = make_chunks(SHAPE, 3)
    for node in (0, 1):
        stack.start(node)
    async with FakeWorker(stack.address(0), [SHAPE]) as worker, FakeWorker(stack.address(1), [SHAPE]) as other:
        # What a node learns at its start it would know without asking.
        await until(lambda: "sessions listed" in stack.log(1))
        await worker.save(session("s"), SHAPE, chunks)
        worker.turn(make_manifest(session("s"), SHAPE, list(chunks)))
        await worker.flush()
        quick = await worker.residency(session("s"), local=True)
        assert {t.tier: list(t.layer_chunks) for t in quick.tiers if t.tier != "hbm"} == {
            t: [3] * SHAPE.layers for t in ("dram", "ssd", "blob")
        }
        assert not (await other.residency(session("s"), local=True)).known
        asked = await other.residency(session("s"))
        assert {t.tier: t.tokens for t in asked.tiers if t.tokens} == {"blob": 3 * SHAPE.chunk_tokens}
