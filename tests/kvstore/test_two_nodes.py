"""Two real stores: what one saves the other loads, byte for byte, whatever happened in between."""

from __future__ import annotations

import asyncio
import shutil
import signal
import urllib.request
from pathlib import Path

import psutil
import pytest

from contracts.convert import manifest_to_wire
from contracts.ids import SessionKey
from contracts.v1 import kvstore_pb2 as pb
from storelink.arena_sharing import arenas_of
from tests.kvstore.fake_worker import FakeWorker, assert_pieces, make_chunks, make_manifest, make_shape, until

SESSION = SessionKey("default", "a-session")
SHAPE = make_shape()


async def test_chunks_saved_on_one_node_are_in_its_arena_at_once(make_stack):
    stack = make_stack()
    stack.start(0)
    chunks = make_chunks(SHAPE, 5)
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        grant = await worker.save(SESSION, SHAPE, chunks)
        assert list(grant.indices) == [0, 1, 2, 3, 4]
        await worker.flush()
        loaded = await worker.load(SHAPE, list(chunks), session=SESSION)
        assert loaded.near
        assert_pieces(loaded, SHAPE, chunks)
        again = await worker.grant(SESSION, SHAPE, list(chunks))
        assert list(again[1].held) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("transport", ["nixl", "socket"])
async def test_the_other_node_reads_them_from_their_owner(make_stack, transport):
    stack = make_stack(transport=transport)
    stack.start(0)
    stack.start(1)
    chunks = make_chunks(SHAPE, 20)
    async with FakeWorker(stack.address(0), [SHAPE]) as first, FakeWorker(stack.address(1), [SHAPE]) as second:
        await first.save(SESSION, SHAPE, chunks)
        await first.flush()
        shutil.rmtree(stack.config.data / "blob" / "v3" / "chunks")
        loaded = await second.load(SHAPE, list(chunks), session=SESSION, sources=["node-0"])
        assert not loaded.near
        assert_pieces(loaded, SHAPE, chunks)
        assert f'"transport": "{transport}"' in stack.log(1)


async def test_after_a_restart_they_come_from_the_ssd(make_stack):
    stack = make_stack()
    stack.start(0)
    chunks = make_chunks(SHAPE, 8)
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        await worker.save(SESSION, SHAPE, chunks)
        worker.turn(make_manifest(SESSION, SHAPE, list(chunks)))
        await worker.flush()
    stack.signal(0, signal.SIGTERM)
    shutil.rmtree(stack.config.data / "blob" / "v3" / "chunks")
    stack.start(0)
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        loaded = await worker.load(SHAPE, list(chunks), session=SESSION)
        assert not loaded.near
        assert_pieces(loaded, SHAPE, chunks)


async def test_without_the_ssd_they_come_from_the_blob_tier(make_stack):
    stack = make_stack()
    stack.start(0)
    chunks = make_chunks(SHAPE, 8)
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        await worker.save(SESSION, SHAPE, chunks)
        await worker.flush()
    stack.signal(0, signal.SIGKILL)
    shutil.rmtree(stack.config.node(0).ssd)
    stack.start(0)
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        assert_pieces(await worker.load(SHAPE, list(chunks), session=SESSION), SHAPE, chunks)
        await worker.flush()
        assert len(list(stack.config.node(0).ssd.rglob("*"))) == 1 + len(chunks), "a copy is kept on the SSD"


@pytest.mark.parametrize("transport", ["nixl", "socket"])
async def test_a_peer_that_dies_is_replaced_by_the_blob_tier(make_stack, transport):
    stack = make_stack(transport=transport)
    stack.start(0)
    stack.start(1)
    chunks = make_chunks(SHAPE, 30)
    async with FakeWorker(stack.address(0), [SHAPE]) as first, FakeWorker(stack.address(1), [SHAPE]) as second:
        await first.save(SESSION, SHAPE, chunks)
        await first.flush()
        loading = asyncio.ensure_future(second.load(SHAPE, list(chunks), session=SESSION, sources=["node-0"]))
        stack.signal(0, signal.SIGKILL)
        assert_pieces(await loading, SHAPE, chunks)


async def test_a_peer_that_dies_without_a_blob_is_a_miss_and_its_next_life_serves_again(make_stack):
    stack = make_stack()
    stack.start(0)
    stack.start(1)
    chunks = make_chunks(SHAPE, 30)
    async with FakeWorker(stack.address(0), [SHAPE]) as first, FakeWorker(stack.address(1), [SHAPE]) as second:
        await first.save(SESSION, SHAPE, chunks)
        await first.flush()
        shutil.rmtree(stack.config.data / "blob" / "v3" / "chunks")
        warm = await second.load(SHAPE, list(chunks)[:1], session=SESSION, sources=["node-0"])
        assert warm.usable == 1
        stack.signal(0, signal.SIGKILL)
        lost = await second.load(SHAPE, list(chunks), session=SESSION, sources=["node-0"])
        assert lost.usable == 1
        stack.start(0)
        async with FakeWorker(stack.address(0), [SHAPE]):
            for _ in range(40):  # until it is connected again its chunks are a miss
                again = await second.load(SHAPE, list(chunks), session=SESSION, sources=["node-0"])
                if again.usable == len(chunks):
                    break
                await asyncio.sleep(0.5)
            assert_pieces(again, SHAPE, chunks)


async def test_a_frozen_peer_is_given_up_and_without_a_blob_it_is_a_miss(make_stack):
    stack = make_stack()
    stack.start(0)
    stack.start(1)
    chunks = make_chunks(SHAPE, 10)
    async with FakeWorker(stack.address(0), [SHAPE]) as first, FakeWorker(stack.address(1), [SHAPE]) as second:
        await first.save(SESSION, SHAPE, chunks)
        await first.flush()
        shutil.rmtree(stack.config.data / "blob" / "v3" / "chunks")
        stack.signal(0, signal.SIGSTOP)
        loaded = await second.load(SHAPE, list(chunks), session=SESSION, sources=["node-0"])
        assert (loaded.found, loaded.usable) == (0, 0)
        stack.signal(0, signal.SIGCONT)
        assert_pieces(await second.load(SHAPE, list(chunks), session=SESSION, sources=["node-0"]), SHAPE, chunks)


async def test_a_corrupt_file_is_a_miss_from_its_chunk_on_and_is_deleted(make_stack):
    stack = make_stack()
    stack.start(0)
    chunks = make_chunks(SHAPE, 6)
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        await worker.save(SESSION, SHAPE, chunks)
        await worker.flush()
    stack.signal(0, signal.SIGTERM)
    shutil.rmtree(stack.config.data / "blob" / "v3" / "chunks")
    bad = next(stack.config.node(0).ssd.rglob(list(chunks)[3].hex()))
    data = bytearray(bad.read_bytes())
    data[-5000] ^= 1
    bad.write_bytes(data)
    stack.start(0)
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        loaded = await worker.load(SHAPE, list(chunks), session=SESSION)
        assert loaded.usable == 3
        good = dict(list(chunks.items())[:3])
        for (i, layer), data in loaded.pieces.items():
            assert i >= 3 or data == good[list(chunks)[i]][layer]
        await worker.flush()
        await until(lambda: not bad.exists())


async def test_what_the_blob_tier_lacks_after_a_crash_is_written_at_the_next_start(make_stack):
    stack = make_stack()
    stack.start(0)
    chunks = make_chunks(SHAPE, 6)
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        await worker.save(SESSION, SHAPE, chunks)
        worker.turn(make_manifest(SESSION, SHAPE, list(chunks)))
        await worker.flush()
    stack.signal(0, signal.SIGKILL)
    blob = stack.config.data / "blob" / "v3" / "chunks"
    before = {p.name: p.read_bytes() for p in blob.rglob("*") if p.is_file()}
    shutil.rmtree(blob)
    stack.start(0)
    async with FakeWorker(stack.address(0), [SHAPE]):
        await until(lambda: {p.name: p.read_bytes() for p in blob.rglob("*") if p.is_file()} == before)


async def test_idle_sessions_expire_from_every_tier(make_stack):
    stack = make_stack(blob_expiry_s=4)
    stack.start(0)
    old, live = make_chunks(SHAPE, 2, 1), make_chunks(SHAPE, 2, 2)
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        for name, chunks, last_use_s in (("old", old, 1.0), ("live", live, 4e9)):
            session = SessionKey("default", name)
            await worker.save(session, SHAPE, chunks)
            worker.turn(make_manifest(session, SHAPE, list(chunks), last_use_s))
        await worker.flush()
        kept = {key.hex() for key in live}
        for folder in (stack.config.node(0).ssd, stack.config.data / "blob" / "v3" / "chunks"):
            await until(lambda f=folder: {p.name for p in f.rglob("*") if p.is_file()} == kept)


async def test_nothing_beyond_loopback_is_listened_on_and_metrics_are_served(make_stack):
    stack = make_stack()
    stack.start(0)
    async with FakeWorker(stack.address(0), [SHAPE]):
        await until(lambda: "peers can read" in stack.log(0))
        listening = [
            c.laddr
            for c in psutil.Process(stack.processes[0].pid).net_connections("inet")
            if c.status == psutil.CONN_LISTEN
        ]
        assert len(listening) >= 2
        assert {address.ip.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}
        host, port = stack.address(0).split(":")
        answer = await asyncio.to_thread(urllib.request.urlopen, f"http://{host}:{int(port) + 4}/metrics")
        assert b"upbeat_kvstore_used_bytes" in answer.read()


async def test_a_second_process_of_a_node_leaves_the_first_ones_arena_alone(make_stack):
    stack = make_stack()
    stack.start(0)
    chunks = make_chunks(SHAPE, 2)
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        await worker.save(SESSION, SHAPE, chunks)
        first = stack.processes[0]
        stack.start(0)
        assert stack.processes[0].wait(30) == 2
        stack.processes[0] = first
        assert arenas_of(stack.config.node(0).arena_stem) == [Path(worker.welcome.arena_path)]
        assert_pieces(await worker.load(SHAPE, list(chunks)), SHAPE, chunks)


async def test_senseless_messages_detach_their_worker_and_harm_nobody_else(make_stack):
    stack = make_stack()
    stack.start(0)
    chunks = make_chunks(SHAPE, 2)
    async with FakeWorker(stack.address(0), [SHAPE]) as good, FakeWorker(stack.address(0), [SHAPE]) as bad:
        bad.send(taken=pb.LoadTaken(load_id=99, chunks=[1, 2], layers=[1]))
        bad.send(saved=pb.SaveDone(save_id=77, ok=[5]))
        bad.send(turn=pb.Turn(manifest=manifest_to_wire(make_manifest(SESSION, SHAPE, [b"short"]))))
        _, grant = await bad.grant(SESSION, SHAPE, [b"short", b"", b"x" * 33])
        assert list(grant.refused) == [0, 1, 2]
        unknown = make_shape(tag="never declared")
        assert (await bad.load(unknown, list(chunks))).usable == 0
        assert (await bad.load(SHAPE, [*chunks, *chunks])).usable == 0
        await good.save(SESSION, SHAPE, chunks)
        assert (await good.flush()).complete
        assert (await good.load(SHAPE, [*chunks, *chunks])).usable == 2
        assert_pieces(await good.load(SHAPE, list(chunks)), SHAPE, chunks)
