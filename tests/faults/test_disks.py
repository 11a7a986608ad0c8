"""Disks that are full, read-only, broken, slow or not there, under a real store: every load is answered with the right
bytes, the tier is left alone with a line and a gauge, and it serves again when the disk does."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from contracts.ids import SessionKey
from runtime.config_file import dump_config
from tests.kvstore.conftest import Stack, make_stack
from tests.kvstore.fake_worker import FakeWorker, assert_pieces, make_chunks, make_manifest, make_shape
from tests.kvstore.store_metrics import store_metrics, until_nothing_is_held

__all__ = ["make_stack"]
pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]

SHAPE = make_shape()
SESSION = SessionKey("default", "a-session")
LIMIT_S = 60.0
Chunks = dict[bytes, list[bytes]]


class Disk:
    """A small file system of the test's own at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def mount(self, size: str) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        self._run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(self.path))

    def remount(self, options: str) -> None:
        self._run("mount", "-o", f"remount,{options}", str(self.path))

    def unmount(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.path)], check=False, capture_output=True)

    def _run(self, *command: str) -> None:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"this machine does not let a test mount a file system: {done.stderr.strip()}")


@pytest.fixture
def mounted(make_stack: Callable[..., Stack]) -> Iterator[Callable[[str], tuple[Stack, Disk]]]:
    """A function: a stack whose node 0 has an SSD directory on a file system of this size."""
    disks: list[Disk] = []

    def make(size: str) -> tuple[Stack, Disk]:
        if os.geteuid():
            pytest.skip("only root may mount a file system")
        stack = make_stack(ssd_gib=1, disk_reserve=0)
        disk = Disk(stack.config.node(0).ssd)
        disk.mount(size)
        disks.append(disk)
        return stack, disk

    yield make
    for disk in disks:
        disk.unmount()


async def until_tier(stack: Stack, tier: str, up: bool) -> None:
    """Wait until the gauge of the tier shows this."""
    async with asyncio.timeout(LIMIT_S):
        while (await store_metrics(stack.address(0)))[f'tier_up{{tier="{tier}"}}'] != up:  # noqa: ASYNC110 - another process's
            await asyncio.sleep(0.1)


def on_ssd(stack: Stack) -> set[str]:
    return {p.name for p in stack.config.node(0).ssd.rglob("*") if p.is_file() and not p.name.endswith(".part")}


async def until_on_ssd(stack: Stack, chunks: Chunks) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not {key.hex() for key in chunks} <= on_ssd(stack):  # noqa: ASYNC110 - another process's files set no event
            await asyncio.sleep(0.1)


async def save(worker: FakeWorker, seed: int, count: int = 10) -> Chunks:
    """Save a session, all of which must be taken, and wait for write-back."""
    chunks = make_chunks(SHAPE, count, seed)
    session = SessionKey("default", f"session-{seed}")
    assert len((await worker.save(session, SHAPE, chunks)).indices) == count
    worker.turn(make_manifest(session, SHAPE, list(chunks)))
    assert (await worker.flush(60)).complete
    return chunks


async def all_right(worker: FakeWorker, *sessions: Chunks) -> None:
    for chunks in sessions:
        assert_pieces(await worker.load(SHAPE, list(chunks)), SHAPE, chunks)


@pytest.mark.sample
async def test_a_full_disk_is_not_written_until_it_has_room_again_and_then_gets_what_it_is_owed(mounted):
    stack, disk = mounted("5m")
    stack.start(0)
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        sessions = [await save(worker, seed) for seed in range(4)]
        await until_tier(stack, "ssd_write", False)
        assert "no space is left" in stack.log(0)
        assert (await store_metrics(stack.address(0)))['tier_up{tier="ssd_read"}'] == 1
        sessions.append(await save(worker, 9))
        await all_right(worker, *sessions)
        disk.remount("size=64m")
        await until_tier(stack, "ssd_write", True)
        for chunks in sessions:
            await until_on_ssd(stack, chunks)
        await all_right(worker, *sessions, await save(worker, 10))
    await until_nothing_is_held(stack.address(0))
    assert "a tier is used again" in stack.log(0)


@pytest.mark.sample
async def test_a_read_only_disk_still_serves_what_it_has(mounted):
    stack, disk = mounted("64m")
    stack.start(0)
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        before = await save(worker, 1)
    stack.signal(0, signal.SIGTERM)
    shutil.rmtree(stack.config.data / "blob" / "v3" / "chunks")
    disk.remount("ro")
    stack.start(0)
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        await all_right(worker, before)
        during = await save(worker, 2)
        await until_tier(stack, "ssd_write", False)
        assert "read-only" in stack.log(0)
        await all_right(worker, before, during)
        disk.remount("rw")
        await until_tier(stack, "ssd_write", True)
        await until_on_ssd(stack, during)
        await all_right(worker, before, during, await save(worker, 3))
    await until_nothing_is_held(stack.address(0))


async def test_a_disk_that_is_not_there_at_start_is_recovered_when_it_comes(mounted):
    stack, disk = mounted("64m")
    stack.start(0)
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        before = await save(worker, 1)
    stack.signal(0, signal.SIGTERM)
    aside = disk.path.with_name("aside")
    aside.mkdir()
    shutil.copytree(disk.path, aside, dirs_exist_ok=True)
    disk.unmount()
    disk.path.rmdir()
    disk.path.write_text("not a directory")
    stack.start(0)
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        await until_tier(stack, "ssd_read", False)
        await until_tier(stack, "ssd_write", False)
        during = await save(worker, 2)
        await all_right(worker, before, during)
        disk.path.unlink()
        shutil.copytree(aside, disk.path)
        await until_tier(stack, "ssd_read", True)
        await until_tier(stack, "ssd_write", True)
        await until_on_ssd(stack, before | during)
        await all_right(worker, before, during, await save(worker, 3))
    assert '"chunks": 10' in stack.log(0), "the files that had been there are known again"


async def restarted_with(make_stack: Callable[..., Stack], failpoints: dict[str, str]) -> tuple[Stack, Chunks]:
    """A stack that has saved a session and has been started anew with these faults."""
    stack = make_stack()
    stack.start(0)
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        chunks = await save(worker, 1, 30)
    stack.signal(0, signal.SIGTERM)
    text = stack.file.read_text()
    healthy = stack.file.with_name("healthy.yaml")
    healthy.write_text(text)
    armed = stack.config.model_copy(update={"kv": stack.config.kv.model_copy(update={"failpoints": failpoints})})
    stack.file.write_text(dump_config(armed))
    stack.start(0)
    return stack, chunks


@pytest.mark.parametrize("fault", ["error:EIO", "delay:800"])
async def test_a_disk_that_cannot_be_read_or_only_slowly_costs_no_answer_and_no_copy(make_stack, fault):
    stack, chunks = await restarted_with(make_stack, {"ssd.after_read": fault})
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        files = on_ssd(stack)
        await all_right(worker, chunks)
        await until_tier(stack, "ssd_read", False)
        await all_right(worker, chunks, await save(worker, 2))
        assert len(files - on_ssd(stack)) <= 10, "most of what a broken disk has is kept for better days"
    stack.signal(0, signal.SIGKILL)
    stack.file.write_text(stack.file.with_name("healthy.yaml").read_text())
    stack.start(0)
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        await all_right(worker, chunks)
        assert (await store_metrics(stack.address(0)))['tier_up{tier="ssd_read"}'] == 1
    await until_nothing_is_held(stack.address(0))


async def test_a_disk_that_does_not_end_its_writes_is_left_alone_and_saves_go_on(make_stack):
    stack, chunks = await restarted_with(make_stack, {"ssd.before_sync": "delay:20000"})
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        stuck = make_chunks(SHAPE, 3, 5)
        await worker.save(SESSION, SHAPE, stuck)
        await until_tier(stack, "ssd_write", False)
        assert "writes do not end" in stack.log(0)
        later = make_chunks(SHAPE, 10, 6)
        assert len((await worker.save(SESSION, SHAPE, later)).indices) == 10
        await all_right(worker, chunks, stuck, later)
        assert (await worker.flush(60)).complete
        blob = {p.name for p in (stack.config.data / "blob" / "v3" / "chunks").rglob("*")}
        assert {key.hex() for key in (*stuck, *later)} <= blob
    await until_nothing_is_held(stack.address(0))


async def test_a_blob_directory_that_is_not_there_at_start_gets_everything_when_it_comes(make_stack):
    stack = make_stack()
    blob = stack.config.data / "blob"
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_text("not a directory")
    stack.start(0)
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        await until_tier(stack, "blob_read", False)
        chunks = make_chunks(SHAPE, 6, 1)
        await worker.save(SESSION, SHAPE, chunks)
        worker.turn(make_manifest(SESSION, SHAPE, list(chunks)))
        await until_on_ssd(stack, chunks)
        await all_right(worker, chunks)
        await until_tier(stack, "blob_write", False)
        blob.unlink()
        await until_tier(stack, "blob_read", True)
        await until_tier(stack, "blob_write", True)
        async with asyncio.timeout(LIMIT_S):
            while {key.hex() for key in chunks} - {p.name for p in blob.rglob("*")}:  # noqa: ASYNC110 - another process's files
                await asyncio.sleep(0.1)
            while not any((blob / "v3" / "manifests").rglob("*")):  # noqa: ASYNC110 - another process's files
                await asyncio.sleep(0.1)
        await all_right(worker, chunks)
    await until_nothing_is_held(stack.address(0))
