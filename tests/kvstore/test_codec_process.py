"""Codecs in whole stores: what starts, what does not, and what a worker is given back after a restart."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import numpy as np
import pytest

from contracts.ids import SessionKey
from kvstore.tiers.cluster_keys import ClusterKeys
from kvstore.tiers.codecs import Codecs
from kvstore.tiers.format import BLOCK, decode_header
from runtime.config_file import cluster_secret
from storelink.arena_sharing import arenas_of
from tests.kvstore.fake_worker import FakeWorker, Loaded, make_manifest, make_shape, until

SHAPE = make_shape()
SESSION = SessionKey("default", "s")


def chunks_of_numbers(count: int) -> dict[bytes, list[bytes]]:
    """As make_chunks, with values of a model's size: arbitrary bytes are no numbers."""
    random = np.random.default_rng(7)
    values = SHAPE.piece_bytes // 4
    return {
        random.bytes(32): [random.standard_normal(values).astype("<f4").tobytes() for _ in range(SHAPE.layers)]
        for _ in range(count)
    }


def assert_decoded(loaded: Loaded, chunks: dict[bytes, list[bytes]], name: str) -> None:
    """Every piece is what the codec keeps of what was saved."""
    codec = Codecs().find(name)
    assert codec is not None and loaded.usable == len(chunks)
    for i, pieces in enumerate(chunks.values()):
        for layer, piece in enumerate(pieces):
            into = memoryview(bytearray(SHAPE.piece_bytes))
            codec.decode(codec.encode(memoryview(bytearray(piece)), SHAPE, layer), into, SHAPE, layer)
            assert loaded.pieces[i, layer] == bytes(into)


def mapped_files(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def codecs_in(folder: Path, data: Path) -> set[str]:
    keys = ClusterKeys(cluster_secret(data))
    return {
        decode_header(keys, p.read_bytes()[:BLOCK]).layout.codec
        for p in folder.rglob("*")
        if p.is_file() and len(p.name) == 64
    }


async def test_a_raw_store_imports_neither_torch_nor_lmcache(make_stack):
    stack = make_stack()
    stack.start(0)
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        await worker.save(SESSION, SHAPE, chunks_of_numbers(2))
        await worker.flush()
        mapped = mapped_files(stack.processes[0].pid)
    assert "libtorch" not in mapped and "lmcache" not in mapped


async def test_a_codec_that_does_not_work_here_stops_the_start_with_the_remedy(make_stack):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    stack = make_stack(blob_codec="cachegen")
    stack.start(0)
    assert stack.processes[0].wait(60) == 2
    assert "kv.blob_codec = 'cachegen' does not work here" in stack.log(0) and "set kv.blob_codec: raw" in stack.log(0)
    assert not arenas_of(stack.config.node(0).arena_stem)


@pytest.mark.slow
@pytest.mark.sample
async def test_what_was_stored_by_a_codec_is_read_after_a_restart_by_stores_of_any_configuration(make_stack):
    pytest.importorskip("lmcache", reason="the extra [lmcache] is not installed")
    chunks = chunks_of_numbers(5)
    stack = make_stack(ssd_codec="fp8", blob_codec="k16v8")
    stack.start(0)
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        await worker.save(SESSION, SHAPE, chunks)
        worker.turn(make_manifest(SESSION, SHAPE, list(chunks)))
        assert (await worker.flush()).complete
    ssd, blob = stack.config.node(0).ssd, stack.config.data / "blob" / "v3" / "chunks"
    assert (codecs_in(ssd, stack.config.data), codecs_in(blob, stack.config.data)) == ({"fp8"}, {"k16v8"})
    stack.signal(0, signal.SIGTERM)
    raw = make_stack()
    raw.start(0)
    async with FakeWorker(raw.address(0), [SHAPE]) as worker:
        assert_decoded(await worker.load(SHAPE, list(chunks)), chunks, "fp8")
        again = await worker.load(SHAPE, list(chunks))  # from the arena now, with its own checksums
        assert_decoded(again, chunks, "fp8")
    raw.signal(0, signal.SIGTERM)
    for path in [p for p in ssd.rglob("*") if p.is_file()]:
        path.unlink()
    raw.start(0)
    async with FakeWorker(raw.address(0), [SHAPE]) as worker:
        # From blob: twice through a codec. It is a miss while this store imports what reads the first object of a
        # codec.
        async with asyncio.timeout(60):
            while (loaded := await worker.load(SHAPE, list(chunks), session=SESSION)).usable < len(chunks):  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.2)
        for i, pieces in enumerate(chunks.values()):
            got = np.frombuffer(loaded.pieces[i, 0], "<f4")
            assert np.abs(got - np.frombuffer(pieces[0], "<f4")).max() < 0.5
        await until(lambda: codecs_in(ssd, stack.config.data) == {"raw"})


async def test_an_ssd_of_a_given_size_holds_more_chunks_through_a_codec(make_stack):
    chunks = chunks_of_numbers(24)
    raw_bytes, size_bytes = 24 * SHAPE.chunk_bytes, 12 * SHAPE.chunk_bytes
    stack = make_stack(ssd_gib=size_bytes / (1 << 30), ssd_codec="fp8")
    stack.start(0)
    ssd = stack.config.node(0).ssd
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        for chunk in range(0, 24, 4):  # a few at a time: while one is written it counts as raw
            some = dict(list(chunks.items())[chunk : chunk + 4])
            assert not (await worker.save(SESSION, SHAPE, some)).refused
            worker.turn(make_manifest(SESSION, SHAPE, list(chunks)[: chunk + 4]))
            assert (await worker.flush()).complete
        lengths = [p.stat().st_size for p in ssd.rglob("*") if p.is_file()]
        assert len(lengths) == 24 and sum(lengths) <= size_bytes < raw_bytes
