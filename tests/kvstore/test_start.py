"""A store that cannot start says why in one line and leaves nothing behind."""

from __future__ import annotations

import signal

from storelink.arena_sharing import arenas_of
from tests.kvstore.fake_worker import FakeWorker, make_shape


async def test_an_arena_larger_than_the_tmpfs_is_refused_with_the_remedy(make_stack):
    stack = make_stack(dram_gib=1e6)
    stack.start(0)
    assert stack.processes[0].wait(30) == 1
    assert "lower kv.dram_gib" in stack.log(0)
    assert not arenas_of(stack.config.node(0).arena_stem)


async def test_an_unknown_blob_store_is_refused_with_the_remedy(make_stack):
    stack = make_stack(blob_url="gopher://nowhere")
    stack.start(0)
    assert stack.processes[0].wait(30) == 2
    assert "kv.blob_url" in stack.log(0) and "give s3://" in stack.log(0)


async def test_sigterm_is_a_clean_stop_that_unlinks_the_arena(make_stack):
    stack = make_stack()
    stack.start(0)
    async with FakeWorker(stack.address(0), [make_shape()]):
        assert arenas_of(stack.config.node(0).arena_stem)
    stack.signal(0, signal.SIGTERM)
    assert stack.processes[0].returncode == 0
    assert not arenas_of(stack.config.node(0).arena_stem)
