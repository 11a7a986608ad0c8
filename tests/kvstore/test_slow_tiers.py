"""What leaves the slow tiers, with real stores: the SSD's size, and that nothing else is lost for it."""

from __future__ import annotations

import signal
from pathlib import Path

from contracts.ids import SessionKey
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
