"""How much of a disk the slow tiers take by default, that they leave a reserve, and that all goes on when somebody else
fills it."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from contracts.errors import ConfigError
from contracts.ids import SessionKey
from kvstore.tiers.objects import Objects, open_store
from kvstore.tiers.space import Space
from runtime.config import Config
from runtime.config_file import load_config
from runtime.disk_shares import Disk, blob_limit_bytes, disk_of, reserve_bytes, ssd_limit_bytes
from runtime.sections import GIB
from tests.kvstore.conftest import Stack
from tests.kvstore.fake_worker import FakeWorker, assert_pieces, make_chunks, make_manifest, make_shape
from tests.kvstore.store_metrics import store_metrics

SHAPE = make_shape()
MIB = 1 << 20
DISK = Disk(free=600 * GIB, total=1000 * GIB)


def config_of(**kv: object) -> Config:
    return load_config(None, {"kv": kv, "nodes": {"count": 2}})


def test_the_tiers_share_what_a_disk_has_beyond_its_reserve():
    config = config_of(disk_reserve=0.1)
    assert reserve_bytes(config, DISK) == 100 * GIB
    assert ssd_limit_bytes(config, DISK, 0) == 0.4 * 500 * GIB / 2
    assert blob_limit_bytes(config, DISK, 100 * GIB, Path("/")) == 0.8 * 600 * GIB, "what it has is its own to keep"
    assert blob_limit_bytes(config, None, 0, Path("/")) is None, "a bucket does not say what it has"
    assert ssd_limit_bytes(config, Disk(50 * GIB, 1000 * GIB), 0) == 0


def test_sizes_that_are_set_count_as_they_are():
    config = config_of(ssd_gib=3, blob_gib=7)
    assert ssd_limit_bytes(config, DISK, 0) == 3 * GIB
    assert blob_limit_bytes(config, None, 0, Path("/")) == blob_limit_bytes(config, DISK, 0, Path("/")) == 7 * GIB


@pytest.mark.parametrize(
    ("name", "value"), [("disk_reserve", 1.0), ("disk_reserve", -0.1), ("blob_gib", -1), ("blob_gib", float("inf"))]
)
def test_what_makes_no_sense_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=rf"kv\.{name}"):
        config_of(**{name: value})


async def test_a_tier_is_measured_by_its_objects_and_what_cannot_be_asked_is_tried(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one").write_bytes(b"x" * 1000)
    (tmp_path / "two").write_bytes(b"x" * 10)
    assert await Objects(open_store(tmp_path.as_uri(), {}, tmp_path, root="")).stored_bytes() == 1010
    config = load_config(None, {"kv": {"disk_reserve": 0.999}})
    assert Space(tmp_path, config).lacks(1)
    assert not Space(None, config).lacks(1 << 60)
    assert not Space(tmp_path, load_config(None, {"kv": {"disk_reserve": 0.0}})).lacks(1 << 60), (
        "the disk itself says so then"
    )


# ---- real stores on a disk of 24 MB


@pytest.fixture
def small_disk(make_stack: Callable[..., Stack]) -> Iterator[Callable[..., Stack]]:
    """A function: a stack of one node whose data lie on a disk of their own of 24 MiB."""
    mounted: list[Path] = []

    def make(**kv: object) -> Stack:
        if os.geteuid():
            pytest.skip("only root may mount a file system")
        stack = make_stack(nodes=1, **kv)
        data = stack.config.data
        data.mkdir(parents=True)
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(data)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            pytest.skip(f"this machine does not let a test mount a file system: {done.stderr.strip()}")
        mounted.append(data)
        return stack

    yield make
    for data in mounted:
        subprocess.run(["umount", "--lazy", str(data)], check=False, capture_output=True)


async def save(worker: FakeWorker, number: int) -> dict[bytes, list[bytes]]:
    chunks = make_chunks(SHAPE, 10, number)
    session = SessionKey("default", f"s{number}")
    await worker.save(session, SHAPE, chunks)
    worker.turn(make_manifest(session, SHAPE, list(chunks), float(number)))
    assert (await worker.flush(60)).complete
    return chunks


async def sized(stack: Stack) -> None:
    """Both tiers know what they may hold of the disk as it is now; a store learns it just after its start."""
    async with asyncio.timeout(20):
        while True:
            said = await store_metrics(stack.address(0))
            if said['limit_bytes{tier="blob"}'] and said['limit_bytes{tier="ssd"}']:
                return
            await asyncio.sleep(0.05)


async def test_the_blob_tier_never_fills_its_disk_and_the_oldest_sessions_leave(small_disk):
    stack = small_disk()
    stack.start(0)
    size = SHAPE.chunk_bytes * 10
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        await sized(stack)
        saved = [await save(worker, n) for n in range(40 * MIB // size)]
        said = await store_metrics(stack.address(0))
        disk = disk_of(stack.config.data)
        assert disk.free >= reserve_bytes(stack.config, disk), "more was saved than the disk has, and it is not full"
        assert 0 < said['used_bytes{tier="blob"}'] <= said['limit_bytes{tier="blob"}'] < 24 * MIB
        assert 0 < said['used_bytes{tier="ssd"}'] <= said['limit_bytes{tier="ssd"}']
        assert said['events_total{what="sessions_over_blob"}'] > 0
        assert said['tier_up{tier="blob_write"}'] == said['tier_up{tier="ssd_write"}'] == 1, "there was always room"
        assert_pieces(await worker.load(SHAPE, list(saved[-1])), SHAPE, saved[-1])
        assert not (await worker.residency(SessionKey("default", "s0"))).known
        assert (await worker.residency(SessionKey("default", f"s{len(saved) - 1}"))).known


async def test_a_disk_that_somebody_else_fills_is_not_written_and_everything_else_goes_on(small_disk):
    stack = small_disk(disk_reserve=0.2)
    stack.start(0)
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        await sized(stack)
        before = await save(worker, 1)
        other = stack.config.data / "somebody else's"
        other.write_bytes(bytes(disk_of(stack.config.data).free - 3 * MIB))
        free = disk_of(stack.config.data).free
        during = [await save(worker, n) for n in (2, 3)]
        assert free - disk_of(stack.config.data).free < MIB // 4, "only manifests were written"
        said = await store_metrics(stack.address(0))
        assert said['tier_up{tier="ssd_write"}'] == said['tier_up{tier="blob_write"}'] == 0
        assert said['tier_up{tier="ssd_read"}'] == said['tier_up{tier="blob_read"}'] == 1
        async with asyncio.timeout(30):  # it is looked at now and then
            while said['disk_free_bytes{tier="ssd"}'] >= 4 * MIB:
                await asyncio.sleep(0.1)
                said = await store_metrics(stack.address(0))
        assert stack.log(0).count("what is left of the disk stays free (kv.disk_reserve)") == 2, "one line a tier"
        for chunks in (before, *during):
            assert_pieces(await worker.load(SHAPE, list(chunks)), SHAPE, chunks)
        other.unlink()
        async with asyncio.timeout(30):
            while said['tier_up{tier="ssd_write"}'] + said['tier_up{tier="blob_write"}'] < 2:
                await asyncio.sleep(0.2)
                said = await store_metrics(stack.address(0))
        after = await save(worker, 4)
        for chunks in (before, *during, after):
            assert_pieces(await worker.load(SHAPE, list(chunks)), SHAPE, chunks)
