"""Several workers a node, several models a node: one read serves all who want it, nobody is disturbed by another's end,
and each model's slabs give way to the other's."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

from contracts.ids import SessionKey
from contracts.v1 import common_pb2
from tests.kvstore.fake_scheduler import FakeScheduler, wire_session
from tests.kvstore.fake_worker import LIMIT_S, FakeWorker, assert_pieces, make_chunks, make_manifest, make_shape
from tests.kvstore.store_metrics import store_metrics, until_nothing_is_held

SESSION = SessionKey("default", "s")
SHAPE = make_shape()
OTHER = make_shape(4, tag="other model", kv_heads=3, head_dim=40)
MIB = 1 << 20

#: A worker in a process of its own: it asks for everything, takes nothing, and waits to be killed.
_HOLDER = """
import asyncio, sys
from tests.kvstore.fake_worker import FakeWorker, make_chunks, make_shape
async def main():
    async with FakeWorker(sys.argv[1], [make_shape()], "holder") as worker:
        chunks = make_chunks(make_shape(), int(sys.argv[2]), int(sys.argv[3]))
        loaded = await worker.load(make_shape(), list(chunks), take=False)
        print(loaded.usable, flush=True)
        await asyncio.sleep(1000)
asyncio.run(main())
"""


def start_holder(address: str, count: int, seed: int) -> subprocess.Popen[str]:
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, "-c", _HOLDER, address, str(count), str(seed)], stdout=subprocess.PIPE, text=True, cwd=root
    )


async def saved(stack, shape, chunks, session=SESSION) -> None:
    """On node 0, in every tier."""
    async with FakeWorker(stack.address(0), [shape]) as worker:
        await worker.save(session, shape, chunks)
        worker.turn(make_manifest(session, shape, list(chunks)))
        assert (await worker.flush()).complete


async def test_two_workers_that_want_the_same_pieces_share_one_read(make_stack):
    stack = make_stack()
    stack.start(0)
    chunks = make_chunks(SHAPE, 20)
    await saved(stack, SHAPE, chunks)
    stack.signal(0, signal.SIGTERM)
    stack.start(0)
    async with FakeWorker(stack.address(0), [SHAPE], "a") as a, FakeWorker(stack.address(0), [SHAPE], "b") as b:
        for loaded in await asyncio.gather(*(w.load(SHAPE, list(chunks), session=SESSION) for w in (a, b, a, b))):
            assert_pieces(loaded, SHAPE, chunks)
        said = await store_metrics(stack.address(0))
        assert said['read_bytes_total{source="ssd"}'] == 20 * SHAPE.chunk_bytes


async def test_a_worker_that_dies_while_it_loads_disturbs_no_other_and_leaves_no_pin(make_stack):
    stack = make_stack()
    stack.start(0)
    chunks = make_chunks(SHAPE, 30, 7)
    await saved(stack, SHAPE, chunks)
    stack.signal(0, signal.SIGTERM)
    stack.start(0)
    async with FakeWorker(stack.address(0), [SHAPE]) as survivor:
        holder = start_holder(stack.address(0), 30, 7)
        loading = asyncio.ensure_future(survivor.load(SHAPE, list(chunks), session=SESSION))
        try:
            assert (await asyncio.to_thread(holder.stdout.readline)).strip() == "30"
        finally:
            holder.kill()
            holder.wait()
        assert_pieces(await loading, SHAPE, chunks)
        await until_nothing_is_held(stack.address(0))
        # What the dead one held can be evicted: a session as large as the arena comes in whole.
        many = make_chunks(SHAPE, 64 * MIB // SHAPE.chunk_bytes - 30, 8)
        keys = list(many)
        for start in range(0, len(keys), 50):
            part = {key: many[key] for key in keys[start : start + 50]}
            grant = await survivor.save(SESSION, SHAPE, part)
            assert not grant.refused
            assert (await survivor.flush()).complete
        assert_pieces(await survivor.load(SHAPE, keys, session=SESSION), SHAPE, many)


async def test_a_worker_that_is_killed_in_the_middle_of_a_load_disturbs_no_other(make_stack):
    stack = make_stack()
    stack.start(0)
    chunks = make_chunks(SHAPE, 40, 9)
    await saved(stack, SHAPE, chunks)
    for _ in range(3):
        stack.signal(0, signal.SIGTERM)
        stack.start(0)
        async with FakeWorker(stack.address(0), [SHAPE]) as survivor:
            dying = FakeWorker(stack.address(0), [SHAPE])
            await dying.__aenter__()
            lost = asyncio.ensure_future(dying.load(SHAPE, list(chunks), session=SESSION))
            loading = asyncio.ensure_future(survivor.load(SHAPE, list(chunks), session=SESSION))
            await asyncio.sleep(0.01)
            lost.cancel()
            await dying.__aexit__()
            assert_pieces(await loading, SHAPE, chunks)


async def test_a_hint_is_offered_to_the_device_that_is_to_answer_and_to_no_other(make_stack):
    stack = make_stack()
    chunks = make_chunks(SHAPE, 4)
    async with FakeScheduler(stack.config.scheduler_addresses[0]) as scheduler:
        stack.start(0)
        await saved(stack, SHAPE, chunks)
        async with (
            FakeWorker(stack.address(0), [SHAPE], "a") as a,
            FakeWorker(stack.address(0), [SHAPE, OTHER], "b", device=1) as b,
            FakeWorker(stack.address(0), [OTHER], "c", device=2) as c,
        ):
            for device, chosen in enumerate((a, b)):
                await scheduler.advise("node-0", "s", device=device)
                assert list((await asyncio.wait_for(chosen.offers.get(), LIMIT_S)).keys) == list(chunks)
            await scheduler.advise("node-0", "s", device=2)  # which does not serve the model
            # All know of an invalidation that came later, so they would have had the offers by now.
            await scheduler.tell("node-0", invalidate=wire_session("s"))
            for worker in (a, b, c):
                assert await asyncio.wait_for(worker.invalidated.get(), LIMIT_S) == SESSION
                assert worker.offers.empty()
            # Whom the hint was not for finds the session in DRAM all the same.
            assert_pieces(await a.load(SHAPE, list(chunks), session=SESSION), SHAPE, chunks)


async def test_a_hint_for_a_device_whose_worker_comes_late_is_offered_to_that_one(make_stack):
    stack = make_stack()
    chunks = make_chunks(SHAPE, 4)
    async with FakeScheduler(stack.config.scheduler_addresses[0]) as scheduler:
        stack.start(0)
        await saved(stack, SHAPE, chunks)
        async with FakeWorker(stack.address(0), [SHAPE], "a") as a:
            await scheduler.advise("node-0", "s", device=1)
            await scheduler.tell("node-0", invalidate=wire_session("other"))
            await asyncio.wait_for(a.invalidated.get(), LIMIT_S)
            async with FakeWorker(stack.address(0), [SHAPE], "b", device=1) as b:
                assert list((await asyncio.wait_for(b.offers.get(), LIMIT_S)).keys) == list(chunks)
            assert a.offers.empty()


async def test_an_erased_session_is_erased_in_every_worker(make_stack):
    stack = make_stack()
    chunks = make_chunks(SHAPE, 4)
    async with FakeScheduler(stack.config.scheduler_addresses[0]) as scheduler:
        stack.start(0)
        await saved(stack, SHAPE, chunks)
        async with FakeWorker(stack.address(0), [SHAPE], "a") as a, FakeWorker(stack.address(0), [OTHER], "b") as b:
            await scheduler.tell("node-0", erase=wire_session("s"))
            for worker in (a, b):
                assert set(await asyncio.wait_for(worker.erased.get(), LIMIT_S)) == set(chunks)


async def test_what_workers_hold_in_hbm_is_told_together(make_stack):
    stack = make_stack()
    stack.start(0)
    chunks = make_chunks(SHAPE, 4)
    await saved(stack, SHAPE, chunks)
    async with (
        FakeWorker(stack.address(0), [SHAPE], "a") as a,
        FakeWorker(stack.address(0), [SHAPE], "b") as b,
        FakeWorker(stack.address(0), [OTHER], "c") as c,
    ):
        a.hbm_answer = common_pb2.TierResidency(tier="hbm", layer_chunks=[4, 4, 2, 0, 0, 0], tokens=0, bytes=1000)
        b.hbm_answer = common_pb2.TierResidency(tier="hbm", layer_chunks=[1, 1, 1, 1, 1, 1], tokens=64, bytes=600)
        c.hbm_answer = common_pb2.TierResidency(tier="hbm", layer_chunks=[9, 9, 9, 9], tokens=999, bytes=999)
        tiers = {t.tier: t for t in (await a.residency(SESSION)).tiers}
        assert len(tiers) == 4
        assert (list(tiers["hbm"].layer_chunks), tiers["hbm"].tokens, tiers["hbm"].bytes) == (
            [4, 4, 2, 1, 1, 1],
            64,
            1600,
        )
        assert tiers["dram"].bytes == 4 * SHAPE.chunk_bytes


async def test_a_worker_gets_nothing_of_a_model_that_it_did_not_declare(make_stack):
    stack = make_stack()
    stack.start(0)
    chunks = make_chunks(SHAPE, 2)
    await saved(stack, SHAPE, chunks)
    liar = make_shape(5)  # the same fingerprint with another shape
    async with FakeWorker(stack.address(0), [OTHER]) as foreign, FakeWorker(stack.address(0), [liar]) as lying:
        for worker in (foreign, lying):
            assert (await worker.load(SHAPE, list(chunks))).usable == 0
            assert list((await worker.grant(SESSION, SHAPE, list(chunks)))[1].refused) == [0, 1]
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        assert_pieces(await worker.load(SHAPE, list(chunks)), SHAPE, chunks)


async def test_two_models_of_different_piece_sizes_make_room_for_each_other(make_stack):
    stack = make_stack()
    stack.start(0)
    assert SHAPE.piece_bytes % OTHER.piece_bytes and OTHER.piece_bytes % SHAPE.piece_bytes
    sessions = {"s": (SHAPE, SESSION), "o": (OTHER, SessionKey("default", "o"))}
    async with FakeWorker(stack.address(0), [SHAPE], "a") as a, FakeWorker(stack.address(0), [OTHER], "b") as b:
        workers = {"s": a, "o": b}
        held: dict[str, dict[bytes, list[bytes]]] = {"s": {}, "o": {}}
        for turn in range(6):  # each turn is most of the arena, so each one's pieces must go for the other's
            name = "so"[turn % 2]
            shape, session = sessions[name]
            fresh = make_chunks(shape, 40 * MIB // shape.chunk_bytes, 100 + turn)
            keys = list(fresh)
            for start in range(0, len(keys), 40):
                part = {key: fresh[key] for key in keys[start : start + 40]}
                grant = await workers[name].save(session, shape, part)
                assert not grant.refused, (name, turn, start)
                assert (await workers[name].flush()).complete
            held[name] = fresh
        for name in ("s", "o", "s"):
            shape, session = sessions[name]
            assert_pieces(await workers[name].load(shape, list(held[name]), session=session), shape, held[name])
        both = await asyncio.gather(
            *(workers[n].load(sessions[n][0], list(held[n])[:100], session=sessions[n][1]) for n in ("s", "o"))
        )
        for name, loaded in zip(("s", "o"), both, strict=True):
            assert_pieces(loaded, sessions[name][0], dict(list(held[name].items())[:100]))
