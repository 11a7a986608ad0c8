"""A session of more pieces than a store plans at once comes back whole, for a request and for a hint."""

from __future__ import annotations

import asyncio
import signal

from contracts.ids import SessionKey
from kvstore.core.loads import PIECES_AT_ONCE
from tests.kvstore.fake_scheduler import FakeScheduler
from tests.kvstore.fake_worker import LIMIT_S, FakeWorker, assert_pieces, make_chunks, make_manifest, make_shape

SESSION = SessionKey("default", "s")
SHAPE = make_shape(32, kv_heads=1, head_dim=8, chunk_tokens=16)
CHUNKS = 4 * PIECES_AT_ONCE // SHAPE.layers


async def saved(stack) -> dict[bytes, list[bytes]]:
    """In no tier but the SSD. Returns the chunks."""
    stack.start(0)
    chunks = make_chunks(SHAPE, CHUNKS)
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        await worker.save(SESSION, SHAPE, chunks)
        worker.turn(make_manifest(SESSION, SHAPE, list(chunks)))
        assert (await worker.flush()).complete
    stack.signal(0, signal.SIGTERM)
    stack.start(0)
    return chunks


async def test_all_of_it_comes_for_a_request(make_stack):
    stack = make_stack()
    chunks = await saved(stack)
    async with FakeWorker(stack.address(0), [SHAPE]) as worker:
        assert_pieces(await worker.load(SHAPE, list(chunks), session=SESSION), SHAPE, chunks)


async def test_all_of_it_is_offered_after_a_hint(make_stack):
    stack = make_stack()
    chunks = await saved(stack)
    address = stack.config.scheduler_addresses[0]
    async with FakeScheduler(address) as scheduler, FakeWorker(stack.address(0), [SHAPE]) as worker:
        await scheduler.wait(lambda s: s.held.get("node-0", {}).get("s"))
        await scheduler.advise("node-0", "s")
        offer = await asyncio.wait_for(worker.offers.get(), LIMIT_S)
        assert list(offer.keys) == list(chunks)
        assert_pieces(await worker.load(SHAPE, list(chunks), session=SESSION, prefetch=True), SHAPE, chunks)
