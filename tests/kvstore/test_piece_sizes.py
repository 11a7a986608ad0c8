"""A store holds pieces of the size that their model says, whatever K and V of its heads would have."""

from __future__ import annotations

import json
import signal
from dataclasses import replace

import pytest

from contracts.ids import SessionKey
from contracts.kv import KvShape
from tests.kvstore.fake_worker import FakeWorker, assert_pieces, make_chunks, make_manifest, make_shape

SESSION = SessionKey("default", "a-session")
#: One latent of 512 values and 64 that carry positions a token, as DeepSeek's models have it (MLA).
LATENT = KvShape(b"mla".ljust(32, b"."), 5, 1, 576, 32, "bfloat16", 32 * 576 * 2)
#: A byte a value, and scales behind them.
FP8 = KvShape(b"fp8".ljust(32, b"."), 3, 2, 32, 16, "float8_e4m3fn", 2 * 2 * 16 * 32 + 100)


@pytest.mark.parametrize("shape", [LATENT, FP8], ids=["latent", "fp8"])
async def test_pieces_of_another_size_than_their_heads_come_back_from_every_tier(make_stack, shape):
    stack = make_stack(transport="socket")
    stack.start(0)
    stack.start(1)
    chunks = make_chunks(shape, 12)
    keys = list(chunks)
    async with (
        FakeWorker(stack.address(0), [shape, make_shape()]) as first,
        FakeWorker(stack.address(1), [shape]) as second,
    ):
        assert list((await first.save(SESSION, shape, chunks)).indices) == list(range(12))
        first.turn(make_manifest(SESSION, shape, keys))
        assert (await first.flush()).complete
        near = await first.load(shape, keys, session=SESSION)
        assert near.near
        assert_pieces(near, shape, chunks)
        assert_pieces(await second.load(shape, keys, session=SESSION, sources=["node-0"]), shape, chunks)
        dram = next(t for t in (await first.residency(SESSION, local=True)).tiers if t.tier == "dram")
        assert dram.bytes == 12 * shape.chunk_bytes
    stack.signal(0, signal.SIGTERM)
    stack.start(0)
    async with FakeWorker(stack.address(0), [shape]) as worker:
        loaded = await worker.load(shape, keys, session=SESSION)
        assert not loaded.near
        assert_pieces(loaded, shape, chunks)
    (stack.config.data / "node-1" / "ssd").rename(stack.config.data / "gone")
    stack.signal(1, signal.SIGTERM)
    stack.start(1)
    async with FakeWorker(stack.address(1), [shape]) as worker:
        assert_pieces(await worker.load(shape, keys, session=SESSION), shape, chunks)


async def test_a_shape_that_no_store_can_hold_is_refused_by_field_and_another_of_the_same_worker_is_served(make_stack):
    stack = make_stack(nodes=1)
    stack.start(0)
    good = make_shape()
    chunks = make_chunks(good, 2)
    async with FakeWorker(stack.address(0), [replace(LATENT, piece_bytes=1 << 40), good]) as worker:
        assert list((await worker.save(SESSION, good, chunks)).indices) == [0, 1]
        assert list((await worker.grant(SESSION, LATENT, [b"k" * 32]))[1].refused) == [0]
        await worker.flush()
    async with FakeWorker(stack.address(0), [replace(good, piece_bytes=good.piece_bytes // 2)]) as worker:
        assert list((await worker.grant(SESSION, good, [b"k" * 32]))[1].refused) == [0]
    refused = [json.loads(line) for line in stack.log(0).splitlines() if "shape is refused" in line]
    assert [line["field"] for line in refused] == ["piece_bytes", "piece_bytes"]
    assert refused[0]["reason"].startswith("piece_bytes = 1099511627776: must be at most")
    assert refused[1]["reason"].endswith(f"this store knows the fingerprint with {good.piece_bytes}")
