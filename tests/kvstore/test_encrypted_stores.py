"""Encryption in real stores: what lies on disk and in blob is unreadable without the session's key, comes back with it,
and never after the session was erased."""

from __future__ import annotations

import asyncio
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kvstore.conftest import Stack
from tests.kvstore.fake_scheduler import FakeScheduler, wire_session
from tests.kvstore.fake_worker import LIMIT_S, FakeWorker, assert_pieces, make_chunks, make_manifest, make_shape, until
from tests.kvstore.test_sessions import chunk_files, session

SHAPE = make_shape()


def files(root: Path) -> list[Path]:
    return [p for p in root.rglob("*") if p.is_file()]


def blob(stack: Stack) -> Path:
    return stack.config.data / "blob" / "v3"


def in_plain(stack: Stack, chunks: dict[bytes, list[bytes]]) -> int:
    """How many pieces lie somewhere below DATA as they are."""
    stored = [p.read_bytes() for p in files(stack.config.data)]
    return sum(any(piece[:64] in data for data in stored) for pieces in chunks.values() for piece in pieces)


async def save(worker: FakeWorker, name: str, chunks: dict[bytes, list[bytes]], note: bytes = b"") -> None:
    await worker.save(session(name), SHAPE, chunks)
    worker.turn(replace(make_manifest(session(name), SHAPE, list(chunks)), note=note))
    assert (await worker.flush()).complete


def restart(stack: Stack, node: int = 0) -> None:
    """The arena and all keys in memory are gone."""
    stack.signal(node, signal.SIGKILL)
    stack.start(node)


@pytest.mark.parametrize("direct", ["auto", "off"])
async def test_an_encrypted_session_returns_from_the_ssd_from_blob_and_to_another_node(make_stack, direct):
    stack, chunks = make_stack(encrypt=True, direct_io=direct), make_chunks(SHAPE, 6)
    stack.start(0)
    stack.start(1)
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        await save(worker, "s", chunks)
    assert len(chunk_files(stack.config.node(0).ssd)) == len(chunk_files(blob(stack) / "chunks")) == 6
    assert not in_plain(stack, chunks) and len(files(blob(stack) / "keys")) == 1
    restart(stack)
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        first = await worker.load(SHAPE, list(chunks), session=session("s"), layers=range(2))
        assert first.usable == 6 and all(first.pieces[i, 1] == p[1] for i, p in enumerate(chunks.values()))
        assert_pieces(await worker.load(SHAPE, list(chunks), session=session("s")), SHAPE, chunks)
    async with FakeWorker(stack.address(1), [SHAPE]) as other:  # from blob
        assert_pieces(await other.load(SHAPE, list(chunks), session=session("s")), SHAPE, chunks)


async def test_a_file_that_a_start_only_listed_comes_back_once_its_header_has_named_the_key(make_stack):
    stack, chunks = make_stack(encrypt=True, nodes=1), make_chunks(SHAPE, 3)
    stack.start(0)
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        await save(worker, "s", chunks)
    stack.signal(0, signal.SIGKILL)
    shutil.rmtree(blob(stack) / "chunks")  # so that only the SSD has them
    stack.start(0)
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        assert_pieces(await worker.load(SHAPE, list(chunks), session=session("s")), SHAPE, chunks)


async def test_a_hint_returns_the_note_that_only_its_worker_may_read(make_stack):
    stack, chunks, note = make_stack(encrypt=True, nodes=1), make_chunks(SHAPE, 2), b"tokens of the conversation"
    async with FakeScheduler(stack.config.scheduler_addresses[0]) as scheduler:
        stack.start(0)
        async with FakeWorker(stack.address(0), [SHAPE]) as worker:
            await save(worker, "s", chunks, note)
        assert not any(note in p.read_bytes() for p in files(stack.config.data))
        await scheduler.wait(lambda s: s.hellos["node-0"] == 1)
        restart(stack)
        async with FakeWorker(stack.address(0), [SHAPE]) as worker:
            await scheduler.wait(lambda s: s.hellos["node-0"] == 2 and "s" in s.held["node-0"])
            await scheduler.advise("node-0", "s")
            offer = await asyncio.wait_for(worker.offers.get(), LIMIT_S)
            assert offer.note == note and list(offer.keys) == list(chunks)


async def erase(scheduler: FakeScheduler, name: str) -> None:
    """Erase on node 0 and wait until that is verified."""
    await scheduler.tell("node-0", erase=wire_session(name))
    await scheduler.wait(lambda s: any(e.session.session_id == name and e.verified for e in s.erased.get("node-0", [])))


async def test_a_chunk_whose_first_session_was_erased_is_recomputed_and_saved_for_the_other(make_stack):
    stack = make_stack(encrypt=True, nodes=1)
    shared, own, other = make_chunks(SHAPE, 2, 1), make_chunks(SHAPE, 2, 2), make_chunks(SHAPE, 2, 3)
    async with FakeScheduler(stack.config.scheduler_addresses[0]) as scheduler:
        stack.start(0)
        async with FakeWorker(stack.address(0), [SHAPE]) as worker:
            await save(worker, "first", {**shared, **own})
            await save(worker, "second", {**shared, **other})
            await erase(scheduler, "first")
            # The arena still has them.
            assert_pieces(await worker.load(SHAPE, [*shared, *other]), SHAPE, {**shared, **other})
        restart(stack)
        async with FakeWorker(stack.address(0), [SHAPE]) as worker:
            gone = await worker.load(SHAPE, [*shared, *other], session=session("second"))
            assert gone.usable == 0 and all(i >= len(shared) for i, _ in gone.pieces)
            assert_pieces(await worker.load(SHAPE, list(other), session=session("second")), SHAPE, other)
            assert (await worker.load(SHAPE, list(own))).usable == 0
            await save(worker, "second", {**shared, **other})  # recomputed
        restart(stack)
        async with FakeWorker(stack.address(0), [SHAPE]) as worker:
            whole = await worker.load(SHAPE, [*shared, *other], session=session("second"))
            assert_pieces(whole, SHAPE, {**shared, **other})
        shutil.rmtree(stack.config.node(0).ssd)
        restart(stack)
        async with FakeWorker(stack.address(0), [SHAPE]) as worker:
            whole = await worker.load(SHAPE, [*shared, *other], session=session("second"))
            assert_pieces(whole, SHAPE, {**shared, **other})


async def test_a_backup_from_before_the_erasure_cannot_be_read_unless_it_has_the_keys(make_stack, tmp_path):
    stack, chunks = make_stack(encrypt=True, nodes=1), make_chunks(SHAPE, 4)
    data, backup = stack.config.data, tmp_path / "backup"
    async with FakeScheduler(stack.config.scheduler_addresses[0]) as scheduler:
        stack.start(0)
        async with FakeWorker(stack.address(0), [SHAPE]) as worker:
            await save(worker, "s", chunks)
            shutil.copytree(data, backup)
            await erase(scheduler, "s")
        assert not files(blob(stack) / "keys")
    for with_keys in (False, True):
        stack.signal(0, signal.SIGKILL)
        shutil.rmtree(data)
        shutil.copytree(backup, data)  # disk, bucket, journal: no tombstone knows of the erasure any more
        if not with_keys:
            shutil.rmtree(blob(stack) / "keys")
        stack.start(0)
        async with FakeWorker(stack.address(0), [SHAPE]) as worker:
            loaded = await worker.load(SHAPE, list(chunks), session=session("s"))
            if with_keys:  # docs/security.md: whoever restores the keys too restores the session
                assert_pieces(loaded, SHAPE, chunks)
            else:
                assert loaded.usable == 0 and not loaded.pieces
                await until(lambda: not chunk_files(stack.config.node(0).ssd))


async def test_while_blob_is_away_encrypted_files_wait_for_their_key(make_stack):
    stack, chunks = make_stack(encrypt=True, nodes=1), make_chunks(SHAPE, 3)
    top, away = stack.config.data / "blob", stack.config.data / "away"
    stack.start(0)
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        await save(worker, "s", chunks)
    stack.signal(0, signal.SIGKILL)
    top.rename(away)
    top.write_text("no directory")
    stack.start(0)
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        locked = await worker.load(SHAPE, list(chunks), session=session("s"))
        assert locked.usable == 0 and not locked.pieces
        assert len(chunk_files(stack.config.node(0).ssd)) == 3
        top.unlink()
        away.rename(top)
        async with asyncio.timeout(LIMIT_S):  # a tier that is down is tried again after a pause
            loaded = await worker.load(SHAPE, list(chunks), session=session("s"))
            while not loaded.usable:
                await asyncio.sleep(0.1)
                loaded = await worker.load(SHAPE, list(chunks), session=session("s"))
        assert_pieces(loaded, SHAPE, chunks)


async def test_a_store_reads_what_it_wrote_before_the_option_was_changed(make_stack):
    stack = make_stack(nodes=1)
    plain, sealed, again = (make_chunks(SHAPE, 2, seed) for seed in (1, 2, 3))
    everything: dict[bytes, list[bytes]] = {}
    for name, chunks, value in (("a", plain, "false"), ("b", sealed, "true"), ("c", again, "false")):
        stack.start(0, {"UPBEAT__KV__ENCRYPT": value})
        everything |= chunks
        async with FakeWorker(stack.address(0), [SHAPE]) as worker:
            await save(worker, name, chunks)
            for held in (plain, sealed, again):
                if held.keys() <= everything.keys():
                    assert_pieces(await worker.load(SHAPE, list(held)), SHAPE, held)
        assert (in_plain(stack, chunks) == 0) == (value == "true")
        stack.signal(0, signal.SIGKILL)
    shutil.rmtree(stack.config.node(0).ssd)  # all from blob
    stack.start(0)
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        assert_pieces(await worker.load(SHAPE, list(everything)), SHAPE, everything)
