"""Who a node's directory and arena belong to: one store at a time, and what a worker maps is what the store
verifies."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from contracts.errors import ConfigError
from contracts.exits import WRONG_USAGE
from contracts.ids import SessionKey
from kvstore.tiers.arena import Arena
from runtime.config_file import changed, dump_config
from runtime.directory_lock import DirectoryLock
from storelink.arena_sharing import SharedArena, arenas_of, path_of, remove_dead
from tests.kvstore.conftest import Stack
from tests.kvstore.fake_worker import FakeWorker, assert_pieces, make_chunks, make_manifest, make_shape, until
from tests.kvstore.store_metrics import store_metrics

SHAPE = make_shape()
SESSION = SessionKey("default", "s")
MIB = 1 << 20


def second_store(stack: Stack, free_port: int, shm_dir: Path | None = None) -> subprocess.Popen[bytes]:
    """Another store of node 0 with the same data directory: other ports, as in another container."""
    overrides = {"nodes": {"base_port": free_port}, "shm_dir": str(shm_dir or stack.config.shm_dir)}
    file = stack.file.with_name("second.yaml")
    file.write_text(dump_config(changed(stack.config, overrides)))
    log = stack.file.with_name("kvstore-second.log").open("wb")
    command = [sys.executable, "-m", "kvstore", "--config", str(file), "--node", "0"]
    return subprocess.Popen(command, stdout=log, stderr=log, cwd=Path(__file__).parents[2])


async def test_a_second_store_on_a_nodes_directory_does_not_start_and_changes_nothing(make_stack, free_ports, tmp_path):
    stack = make_stack(nodes=1)
    stack.start(0)
    chunks = make_chunks(SHAPE, 2)
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        for shm_dir in (None, tmp_path / "shm"):
            second = second_store(stack, free_ports(20), shm_dir)
            assert second.wait(30) == 2, "as for a wrong configuration: a supervisor does not start it for ever"
            said = stack.file.with_name("kvstore-second.log").read_text()
            using = f"is in use by another store (pid {stack.processes[0].pid} on host"
            assert f"{stack.config.node(0).directory} {using}" in said
            assert "stop that one, or give this one another data directory" in said
        arena = worker.welcome.arena_path
    async with FakeWorker(stack.address(0), [SHAPE]) as again:
        assert again.welcome.arena_path == arena
        await again.save(SESSION, SHAPE, chunks)
        again.turn(make_manifest(SESSION, SHAPE, list(chunks)))
        assert (await again.flush()).complete
    stack.signal(0, signal.SIGTERM)
    stack.start(0)
    async with FakeWorker(stack.address(0), [SHAPE]) as after:
        assert_pieces(await after.load(SHAPE, list(chunks), session=SESSION), SHAPE, chunks)


async def test_a_killed_stores_successor_starts_at_once_with_an_arena_of_its_own(make_stack, free_ports):
    stack = make_stack(nodes=1)
    chunks = make_chunks(SHAPE, 2)
    stem, seen = stack.config.node(0).arena_stem, set()
    for life in range(3):
        stack.start(0)
        async with FakeWorker(stack.address(0), [SHAPE]) as worker:
            assert [str(path) for path in arenas_of(stem)] == [worker.welcome.arena_path], (
                "what the killed one left is gone"
            )
            seen.add(worker.welcome.arena_path)
            if life == 0:
                await worker.save(SESSION, SHAPE, chunks)
                worker.turn(make_manifest(SESSION, SHAPE, list(chunks)))
                assert (await worker.flush()).complete
            assert_pieces(await worker.load(SHAPE, list(chunks), session=SESSION), SHAPE, chunks)
            stack.signal(0, signal.SIGKILL)
    assert len(seen) == 3
    # The other one may have the directory now, and the first one may not.
    second = second_store(stack, free_ports(20))
    try:
        await until(
            lambda: "serving" in stack.file.with_name("kvstore-second.log").read_text() or second.poll() is not None
        )
        assert second.poll() is None
        stack.start(0)
        assert stack.processes[0].wait(30) == 2
        assert f"pid {second.pid}" in stack.log(0)
    finally:
        second.kill()
        second.wait(30)


async def test_a_directory_that_cannot_be_locked_is_not_used_until_it_can_be_and_never_beside_another_store(make_stack):
    stack = make_stack(nodes=1)
    directory = stack.config.node(0).directory
    directory.parent.mkdir(parents=True)
    directory.write_text("not a directory")
    stack.start(0)
    chunks = make_chunks(SHAPE, 2)
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        assert "cannot be locked" in stack.log(0)
        assert (await store_metrics(stack.address(0)))['tier_up{tier="ssd_write"}'] == 0
        await worker.save(SESSION, SHAPE, chunks)
        assert_pieces(await worker.load(SHAPE, list(chunks), session=SESSION), SHAPE, chunks)
        directory.unlink()
        other = DirectoryLock(directory / "lock", "store")
        other.take()
        assert await asyncio.to_thread(stack.processes[0].wait, 30) == WRONG_USAGE, "as at a start"
    assert "is in use by another store" in stack.log(0)
    assert not stack.config.node(0).ssd.exists() or not any(p.is_file() for p in stack.config.node(0).ssd.rglob("*"))
    other.release()


async def test_a_worker_that_has_not_mapped_the_stores_own_arena_is_told_no_offsets(make_stack):
    stack = make_stack(nodes=1)
    stack.start(0)
    chunks = make_chunks(SHAPE, 2)
    async with FakeWorker(stack.address(0), [SHAPE]) as good, FakeWorker(stack.address(0), [SHAPE]) as unmapped:
        unmapped.shared.leave()
        elsewhere = stack.file.with_name("copy.arena")
        shutil.copyfile(good.welcome.arena_path, elsewhere)
        with elsewhere.open("r+b") as file:
            unmapped.shared._fd = os.dup(file.fileno())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2):
                await unmapped.grant(SESSION, SHAPE, list(chunks))
        assert "it has not mapped this store's arena" in stack.log(0)
        await good.save(SESSION, SHAPE, chunks)
        assert_pieces(await good.load(SHAPE, list(chunks), session=SESSION), SHAPE, chunks)


async def test_what_a_worker_that_is_cut_off_may_still_touch_stays_its_own_until_it_lets_go(make_stack):
    stack = make_stack(nodes=1)
    stack.start(0)
    async with FakeWorker(stack.address(0), [SHAPE]) as other:
        chunks = make_chunks(SHAPE, 2)
        await other.save(SESSION, SHAPE, chunks)
        assert (await other.flush()).complete
        cut = FakeWorker(stack.address(0), [SHAPE])
        await cut.__aenter__()
        _, grant = await cut.grant(SESSION, SHAPE, list(make_chunks(SHAPE, 3, seed=1)))
        assert len(grant.offsets) == 3 * SHAPE.layers
        await cut.load(SHAPE, list(chunks), take=False)
        cut._reading.cancel()
        await cut.channel.close(None)
        await asyncio.sleep(0.5)
        held = await store_metrics(stack.address(0))
        assert held['held{what="reserved_slots"}'] == 3 * SHAPE.layers
        assert held['held{what="pinned_slots"}'] == 2 * SHAPE.layers
        cut.shared.leave()
        async with asyncio.timeout(10):
            while (held := await store_metrics(stack.address(0)))['held{what="reserved_slots"}']:  # noqa: ASYNC110 - another process's
                await asyncio.sleep(0.05)
        assert held['held{what="pinned_slots"}'] == 0


def test_a_worker_refuses_a_file_that_is_not_the_stores(tmp_path):
    ours, theirs = Arena(tmp_path / "node", MIB), Arena(tmp_path / "node", MIB)
    assert len(arenas_of(tmp_path / "node")) == 2, "a living store's arena is left alone"
    with pytest.raises(OSError, match="is not the arena of the store that was asked"):
        SharedArena(theirs.path, MIB, ours.nonce, 1, "auto")
    assert not theirs.is_used_by(1)
    shared = SharedArena(ours.path, MIB, ours.nonce, 1, "auto")
    assert ours.is_used_by(1) and not ours.is_used_by(2)
    with pytest.raises(OSError, match=r"attachment 1 of .* is in use"):
        SharedArena(ours.path, MIB, ours.nonce, 1, "auto")
    shared.leave()
    assert not ours.is_used_by(1)
    ours.close()
    theirs.close()


def test_only_arenas_of_dead_stores_are_removed(tmp_path):
    stem = tmp_path / "node-1"
    living = Arena(stem, MIB)
    dead, other_node = path_of(stem, bytes(16)), path_of(tmp_path / "node-10", bytes(16))
    for path in (dead, other_node):
        path.write_bytes(b"kv")
    assert arenas_of(stem) == sorted([living.path, dead])
    assert remove_dead(arenas_of(stem)) == [dead]
    assert living.path.exists() and other_node.exists()
    living.close()


def test_a_lock_on_a_directory_names_its_holder_and_ends_with_it(tmp_path):
    first, second = DirectoryLock(tmp_path / "n" / "lock", "store"), DirectoryLock(tmp_path / "n" / "lock", "store")
    first.take()
    first.take()
    with pytest.raises(
        ConfigError, match=rf"{tmp_path}/n is in use by another store \(pid {os.getpid()} on host .*; stop that one"
    ):
        second.take(0)
    (tmp_path / "n" / "lock").write_text("not JSON")
    with pytest.raises(ConfigError, match="which one is not known"):
        second.take(0)
    first.release()
    second.take(0)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"Not a directory|File exists"):
        DirectoryLock(tmp_path / "file" / "lock", "store").take(0)


def test_a_second_worker_of_a_node_does_not_start(make_stack):
    stack = make_stack(nodes=1)
    lock = DirectoryLock(stack.config.node(0).directory / "worker.lock", "worker")
    lock.take()
    command = [sys.executable, "-m", "worker", "--config", str(stack.file), "--node", "0"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 2
    assert "is in use by another worker" in done.stdout + done.stderr
    lock.release()
