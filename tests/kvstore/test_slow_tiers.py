"""What leaves the slow tiers, with real stores: the SSD's size, and that nothing else is lost for it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from contracts.ids import SessionKey
from tests.kvstore.fake_scheduler import FakeScheduler, wire_session
from tests.kvstore.fake_worker import FakeWorker, assert_pieces, make_chunks, make_manifest, make_shape, until

SHAPE = make_shape()
MIB_AS_GIB = 1 / 1024


def session(name: str, tenant: str = "default") -> SessionKey:
    return SessionKey(tenant, name)


def files(folder: Path) -> dict[str, int]:
    return {p.name: p.stat().st_size for p in folder.rglob("*") if p.is_file()}


async def test_the_ssd_stays_under_its_size_and_every_byte_is_right(make_stack):
    limit = 2 << 20
    stack = make_stack(ssd_gib=2 * MIB_AS_GIB)
    stack.start(0)
    ssd = stack.config.node(0).ssd
    sessions = {f"s{i}": make_chunks(SHAPE, 6, i) for i in range(5)}
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        for name, chunks in sessions.items():
            assert len((await worker.save(session(name), SHAPE, chunks)).indices) == 6
            worker.turn(make_manifest(session(name), SHAPE, list(chunks)))
            assert (await worker.flush()).complete
            assert sum(files(ssd).values()) <= limit
        for name, chunks in sessions.items():
            assert_pieces(await worker.load(SHAPE, list(chunks), session=session(name)), SHAPE, chunks)
    assert set(files(ssd)) >= {key.hex() for key in sessions["s4"]}, "the latest session is on the SSD"
    stack.signal(0, signal.SIGKILL)
    stack.start(0)
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        for name, chunks in sessions.items():
            assert_pieces(await worker.load(SHAPE, list(chunks), session=session(name)), SHAPE, chunks)
        assert (await worker.flush()).complete
        await until(lambda: sum(files(ssd).values()) <= limit)


async def test_a_restart_with_a_smaller_size_brings_the_ssd_under_it(make_stack):
    stack = make_stack()
    stack.start(0)
    ssd = stack.config.node(0).ssd
    chunks = make_chunks(SHAPE, 12)
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        await worker.save(session("s"), SHAPE, chunks)
        worker.turn(make_manifest(session("s"), SHAPE, list(chunks)))
        await worker.flush()
        assert len(files(ssd)) == 12
    stack.signal(0, signal.SIGKILL)
    stack.file.write_text(stack.file.read_text().replace("ssd_gib: 0.0", f"ssd_gib: {MIB_AS_GIB}"))
    stack.start(0)
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        await until(lambda: 0 < sum(files(ssd).values()) <= 1 << 20)
        assert set(files(ssd)) == {key.hex() for key in list(chunks)[:5]}, "a session's beginning outlives its end"
        assert_pieces(await worker.load(SHAPE, list(chunks), session=session("s")), SHAPE, chunks)


async def test_an_erasure_is_confirmed_when_no_tier_has_anything_left(make_stack):
    stack = make_stack()
    chunks, shared = make_chunks(SHAPE, 3, 1), make_chunks(SHAPE, 1, 2)
    async with FakeScheduler(stack.config.scheduler_addresses[0]) as scheduler:
        stack.start(0)
        async with FakeWorker(stack.address(0), [SHAPE]) as worker:
            for name, named in (("gone", {**shared, **chunks}), ("stays", shared)):
                await worker.save(session(name), SHAPE, named)
                worker.turn(make_manifest(session(name), SHAPE, list(named)))
            await worker.flush()
            await scheduler.tell("node-0", erase=wire_session("gone"))
            await scheduler.wait(lambda s: s.erased.get("node-0"))
            (answer,) = scheduler.erased["node-0"]
            assert answer.verified and answer.known and not answer.left
            kept = {key.hex() for key in shared}
            assert set(files(stack.config.node(0).ssd)) == kept
            assert set(files(stack.config.data / "blob" / "v3" / "chunks")) == kept


@pytest.mark.slow
async def test_what_the_worker_still_has_is_waited_for_and_named(make_stack):
    stack = make_stack()
    chunks = make_chunks(SHAPE, 2)
    async with FakeScheduler(stack.config.scheduler_addresses[0]) as scheduler:
        stack.start(0)
        async with FakeWorker(stack.address(0), [SHAPE]) as worker:
            await worker.save(session("s"), SHAPE, chunks)
            worker.turn(make_manifest(session("s"), SHAPE, list(chunks)))
            await worker.flush()
            worker.hbm_answer.layer_chunks.extend([2, 1])
            await scheduler.tell("node-0", erase=wire_session("s"))
            await scheduler.wait(lambda s: s.erased.get("node-0"))
            first = scheduler.erased["node-0"][0]
            assert not first.verified and {t.tier: t.chunks for t in first.left} == {"hbm": 2}
            del worker.hbm_answer.layer_chunks[:]
            await scheduler.wait(lambda s: s.erased["node-0"][-1].verified)


async def test_a_node_that_was_down_during_an_erasure_serves_and_keeps_nothing_of_it(make_stack):
    stack = make_stack()
    chunks, other = make_chunks(SHAPE, 3, 1), make_chunks(SHAPE, 2, 2)
    ssd, blob = [stack.config.node(n).ssd for n in (0, 1)], stack.config.data / "blob"
    async with FakeScheduler(stack.config.scheduler_addresses[0]) as scheduler:
        for node in (0, 1):
            stack.start(node)
        async with FakeWorker(stack.address(0), [SHAPE]) as worker:
            for name, named in (("gone", chunks), ("stays", other)):
                await worker.save(session(name), SHAPE, named)
                worker.turn(make_manifest(session(name), SHAPE, list(named)))
            await worker.flush()
        stack.signal(0, signal.SIGKILL)
        assert len(files(ssd[0])) == 5
        await scheduler.tell("node-1", erase=wire_session("gone"))
        await scheduler.wait(lambda s: s.erased.get("node-1"))
        assert scheduler.erased["node-1"][0].verified
        stack.start(0)
        async with FakeWorker(stack.address(0), [SHAPE]) as worker:
            assert (await worker.load(SHAPE, list(chunks), session=session("gone"))).usable == 0
            assert not (await worker.residency(session("gone"))).known
            assert_pieces(await worker.load(SHAPE, list(other), session=session("stays")), SHAPE, other)
            kept = {key.hex() for key in other}
            await until(lambda: set(files(ssd[0])) == kept)
            assert set(files(blob / "v3" / "chunks")) == kept


async def test_chunks_of_a_turn_that_never_ended_leave_after_the_grace_time(make_stack):
    stack = make_stack(orphan_grace_s=1)
    lost, kept = make_chunks(SHAPE, 2, 1), make_chunks(SHAPE, 2, 2)
    stack.start(0)
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        await worker.save(session("kept"), SHAPE, kept)
        worker.turn(make_manifest(session("kept"), SHAPE, list(kept)))
        await worker.save(session("lost"), SHAPE, lost)
        await worker.flush()
    stack.signal(0, signal.SIGKILL)
    stack.start(0)
    names = {key.hex() for key in kept}
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        await until(lambda: set(files(stack.config.node(0).ssd)) == names)
        await until(lambda: set(files(stack.config.data / "blob" / "v3" / "chunks")) == names)
        # of a write that was killed, here or on another node
        staged = stack.config.data / "blob" / "v3" / "chunks" / "m" / "dead#7"
        staged.parent.mkdir()
        staged.touch()
        os.utime(staged, (1, 1))
        await until(lambda: not staged.exists())
        assert_pieces(await worker.load(SHAPE, list(kept), session=session("kept")), SHAPE, kept)


async def test_a_tenant_over_its_quota_gives_its_own_oldest_session_and_nobody_elses(make_stack):
    chunk = SHAPE.chunk_bytes / (1 << 30)
    stack = make_stack(tenant_quota_gib={"small": 4.5 * chunk})
    stack.start(0)
    small = {f"s{i}": make_chunks(SHAPE, 2, i) for i in range(3)}
    large = make_chunks(SHAPE, 8, 9)
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        await worker.save(session("l", "large"), SHAPE, large)
        worker.turn(make_manifest(session("l", "large"), SHAPE, list(large)))
        for name, chunks in small.items():
            assert len((await worker.save(session(name, "small"), SHAPE, chunks)).indices) == 2
            worker.turn(make_manifest(session(name, "small"), SHAPE, list(chunks)))
            assert (await worker.flush()).complete
        kept = {key.hex() for chunks in (large, small["s1"], small["s2"]) for key in chunks}
        for folder in (stack.config.node(0).ssd, stack.config.data / "blob" / "v3" / "chunks"):
            await until(lambda f=folder: set(files(f)) == kept)
        assert_pieces(await worker.load(SHAPE, list(large), session=session("l", "large")), SHAPE, large)
        _, grant = await worker.grant(session("huge", "small"), SHAPE, list(make_chunks(SHAPE, 6, 5)))
        assert list(grant.indices) == [0, 1, 2, 3] and list(grant.refused) == [4, 5]
