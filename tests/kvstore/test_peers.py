"""Several real stores that read from each other at the same time: nobody waits for nobody, and every byte is right."""

from __future__ import annotations

import asyncio
import shutil
import signal
from contextlib import AsyncExitStack

from contracts.ids import SessionKey
from runtime.config_file import dump_config
from tests.kvstore.fake_worker import FakeWorker, assert_pieces, make_chunks, make_shape
from tests.kvstore.store_metrics import store_metrics, until_nothing_is_held

SHAPE = make_shape()
ONE, OTHER = SessionKey("default", "one"), SessionKey("default", "other")


async def workers(stack, nodes: int, into: AsyncExitStack) -> list[FakeWorker]:
    for node in range(nodes):
        stack.start(node)
    return [await into.enter_async_context(FakeWorker(stack.address(node), [SHAPE])) for node in range(nodes)]


def forget_blob(stack) -> None:
    """Only nodes have chunks from here on."""
    shutil.rmtree(stack.config.data / "blob" / "v3" / "chunks")


async def brought(stack, node: int, source: str) -> float:
    return (await store_metrics(stack.address(node))).get(f'read_bytes_total{{source="{source}"}}', 0.0)


async def test_four_nodes_read_one_hot_prompt_of_one_node_at_the_same_time(make_stack):
    stack = make_stack(nodes=5)
    chunks = make_chunks(SHAPE, 24)
    async with AsyncExitStack() as stacked:
        owner, *readers = await workers(stack, 5, stacked)
        await owner.save(ONE, SHAPE, chunks)
        await owner.flush()
        forget_blob(stack)
        for loaded in await asyncio.gather(
            *(r.load(SHAPE, list(chunks), session=ONE, sources=["node-0"]) for r in readers)
        ):
            assert_pieces(loaded, SHAPE, chunks)
        for node in range(1, 5):
            assert await brought(stack, node, "peer") == len(chunks) * SHAPE.chunk_bytes
    for node in range(5):
        await until_nothing_is_held(stack.address(node))


async def test_a_node_that_has_just_fetched_a_prompt_is_a_source_of_it(make_stack):
    stack = make_stack(nodes=3)
    chunks = make_chunks(SHAPE, 12)
    async with AsyncExitStack() as stacked:
        owner, second, third = await workers(stack, 3, stacked)
        await owner.save(ONE, SHAPE, chunks)
        await owner.flush()
        assert_pieces(await second.load(SHAPE, list(chunks), session=ONE, sources=["node-0"]), SHAPE, chunks)
        forget_blob(stack)
        stack.signal(0, signal.SIGKILL)
        assert_pieces(await third.load(SHAPE, list(chunks), session=ONE, sources=["node-0", "node-1"]), SHAPE, chunks)


async def test_two_nodes_that_read_from_each_other_do_not_wait_for_each_other(make_stack):
    stack = make_stack()
    mine, yours, shared = make_chunks(SHAPE, 10, 1), make_chunks(SHAPE, 10, 2), make_chunks(SHAPE, 4, 3)
    async with AsyncExitStack() as stacked:
        first, second = await workers(stack, 2, stacked)
        await first.save(ONE, SHAPE, shared | mine)
        await second.save(OTHER, SHAPE, yours)
        await first.flush()
        await second.flush()
        forget_blob(stack)
        loads = [
            first.load(SHAPE, list(yours), session=OTHER, sources=["node-1"]),
            second.load(SHAPE, list(shared | mine), session=ONE, sources=["node-0"]),
            first.load(SHAPE, list(shared | mine), session=ONE, sources=["node-1"]),
            second.load(SHAPE, list(shared | mine), session=OTHER, sources=["node-0"]),
        ]
        for loaded, wanted in zip(
            await asyncio.gather(*loads), (yours, shared | mine, shared | mine, shared | mine), strict=True
        ):
            assert_pieces(loaded, SHAPE, wanted)
    for node in (0, 1):
        await until_nothing_is_held(stack.address(node))


async def test_two_nodes_that_ask_each_other_for_what_neither_has_hear_at_once_that_it_is_a_miss(make_stack):
    stack = make_stack()
    absent = make_chunks(SHAPE, 6, 7)
    async with AsyncExitStack() as stacked:
        first, second = await workers(stack, 2, stacked)
        loads = [
            first.load(SHAPE, list(absent), sources=["node-1"]),
            second.load(SHAPE, list(absent), sources=["node-0"]),
        ]
        assert [loaded.usable for loaded in await asyncio.gather(*loads)] == [0, 0]


async def test_a_stale_directory_entry_costs_one_question_and_the_next_source_answers(make_stack):
    stack = make_stack(nodes=3)
    chunks = make_chunks(SHAPE, 10)
    async with AsyncExitStack() as stacked:
        owner, _, reader = await workers(stack, 3, stacked)
        await owner.save(ONE, SHAPE, chunks)
        await owner.flush()
        loaded = await reader.load(SHAPE, list(chunks), session=ONE, sources=["node-1", "node-0"])
        assert_pieces(loaded, SHAPE, chunks)
        assert await brought(stack, 2, "peer") == len(chunks) * SHAPE.chunk_bytes, (
            "node 1 had it once, node 0 still does"
        )
        gone = make_chunks(SHAPE, 5, 4)
        await owner.save(OTHER, SHAPE, gone)
        await owner.flush()
        assert_pieces(await reader.load(SHAPE, list(gone), session=OTHER, sources=["node-1"]), SHAPE, gone)
        assert await brought(stack, 2, "blob") == len(gone) * SHAPE.chunk_bytes


async def test_a_peer_that_dies_in_the_middle_of_a_transfer_is_replaced_by_the_blob_tier(make_stack):
    stack = make_stack()
    chunks = make_chunks(SHAPE, 40)
    async with AsyncExitStack() as stacked:
        owner, reader = await workers(stack, 2, stacked)
        await owner.save(ONE, SHAPE, chunks)
        await owner.flush()
        stack.signal(0, signal.SIGTERM)
        kv = stack.config.kv.model_copy(update={"failpoints": {"peer.sending": "kill@4"}})
        stack.file.write_text(dump_config(stack.config.model_copy(update={"kv": kv})))
        stack.start(0)
        async with FakeWorker(stack.address(0), [SHAPE]):
            assert_pieces(await reader.load(SHAPE, list(chunks), session=ONE, sources=["node-0"]), SHAPE, chunks)
        assert stack.processes[0].wait(30) == -signal.SIGKILL
        assert await brought(stack, 1, "blob") > 0
    await until_nothing_is_held(stack.address(1))
