"""Slabs that are partly used are emptied by moving their pages."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.ids import SessionKey
from tests.worker.virtual_device import VirtualDevice
from tests.worker.virtual_model import CHUNK, random_prompt
from worker.core.block import NO_PAGE, Block, SaveState
from worker.core.consolidating import consolidate
from worker.core.hbm import HbmCache
from worker.core.pages import PagePool

LAYERS, SIZE, SLABS = 4, 5, 12
SESSION = SessionKey("t", "s")


class World:
    """A cache, its sequences' blocks, and memory whose pages hold who wrote them."""

    def __init__(self, dice: random.Random) -> None:
        self.cache = HbmCache(PagePool(SLABS, SIZE, LAYERS, bands=dice.choice([1, 2, 4])))
        self.used, self.memory = list[Block](), np.full(SLABS * SIZE, -1)
        blocks = []
        while self.cache.pool.free >= LAYERS:
            block = self.cache.new_block(len(blocks), SESSION, range(LAYERS))
            block.ready[:] = True
            self.cache.use(block)
            if dice.random() < 0.7:
                self.cache.enter(block, bytes([len(blocks)]))
                self.cache.mark(block, SaveState.BELOW)
            self.memory[block.pages] = len(blocks) * LAYERS + np.arange(LAYERS)
            blocks.append(block)
        self.cache.pool.to_map = []
        for block in blocks:
            if dice.random() < 0.6:
                self.cache.release(block)
            else:
                self.used.append(block)

    @property
    def blocks(self) -> list[Block]:
        return [*self.used, *(b for b in self.cache.index.values() if b not in self.used)]

    def consolidate(self, slabs: int) -> int:
        """Pages that moved."""
        mine = [b for b in self.used if b.key is None]
        moved = consolidate(self.cache, self.used, slabs, 1.0)
        self.cache.validate(mine)
        if moved is None:
            return 0
        assert not set(moved.sources.tolist()) & set(moved.targets.tolist())
        self.memory[moved.targets] = self.memory[moved.sources]
        return len(moved.sources)

    def check(self) -> None:
        for block in self.blocks:
            held = block.pages != NO_PAGE
            assert (self.memory[block.pages] == block.index * LAYERS + np.arange(LAYERS))[held].all(), "others' KV"


@given(seed=st.integers(0, 1 << 30), slabs=st.integers(1, SLABS))
@settings(max_examples=200, deadline=None)
def test_as_many_slabs_are_emptied_as_pages_in_use_leave_and_no_page_is_lost(seed: int, slabs: int) -> None:
    world = World(random.Random(seed))
    pool = world.cache.pool
    in_use, before = len(world.used) * LAYERS, pool.used
    world.consolidate(slabs)
    assert pool.used == max(before - slabs, math.ceil(in_use / SIZE))
    assert all(block.held == LAYERS for block in world.used)
    world.check()


@given(seed=st.integers(0, 1 << 30), slabs=st.integers(1, SLABS))
@settings(max_examples=200, deadline=None)
def test_pages_with_a_transfer_under_way_stay_where_they_are(seed: int, slabs: int) -> None:
    dice = random.Random(seed)
    world = World(dice)
    moving = [(block, block.pages.copy()) for block in world.blocks if dice.random() < 0.3]
    for block, _ in moving:
        world.cache.pin(block)
    world.consolidate(slabs)
    assert all((block.pages == pages).all() for block, pages in moving)
    world.check()


def test_nothing_that_is_cached_leaves_while_moving_suffices() -> None:
    cache = HbmCache(PagePool(4, SIZE, 1))
    blocks = []
    for number in range(4 * SIZE):
        block = cache.new_block(number, SESSION, [0])
        block.ready[:] = True
        cache.use(block)
        blocks.append(block)
    cache.pool.to_map = []
    for number, block in enumerate(blocks):
        if number % SIZE == 0:  # cached
            cache.enter(block, bytes([number]))
            cache.mark(block, SaveState.BELOW)
        if number % SIZE < 4:  # one of each slab stays in use
            cache.release(block)
    assert cache.pool.used == 4 and cache.pool.taken == 8
    moved = consolidate(cache, blocks[4::5], 2, 1.0)
    assert moved is not None and len(moved.sources) == 4 and cache.pool.used == 2 and len(cache.index) == 4
    moved = consolidate(cache, blocks[4::5], 1, 1.0)
    assert cache.pool.used == 1 and len(cache.index) == 1 and cache.pool.taken == SIZE


def test_no_page_moves_to_or_from_a_slab_that_is_not_mapped_yet() -> None:
    cache = HbmCache(PagePool(4, SIZE, 1))
    blocks = [cache.new_block(number, SESSION, [0]) for number in range(2 * SIZE)]
    for block in blocks:
        cache.use(block)
    assert cache.pool.to_map == [0, 1]
    for block in blocks[:3] + blocks[5:8]:
        cache.release(block)
    assert consolidate(cache, [*blocks[3:5], *blocks[8:]], 1, 1.0) is None
    with pytest.raises(MemoryError, match="too few free pages"):
        cache.pool.move([0], {int(b.pages[0]): 0 for b in blocks[3:5]})
    cache.validate([*blocks[3:5], *blocks[8:]])


def test_a_sequence_whose_pages_move_while_it_runs_answers_as_before() -> None:
    """Two answers of a model fill slabs together; one ends. Another model gets the memory of the gaps, while the other
    answer goes on."""
    device = VirtualDevice(2, 24)
    a, b = device.models
    short, long = (a.submit(random_prompt(random.Random(n), CHUNK), n, session=f"s{n}") for n in (40, 80))
    device.go(until=lambda: a.answers[short].end is not None)
    device.world.pass_(1.0)
    in_slabs = a.pool.used
    other = b.submit(random_prompt(random.Random(3), 10 * CHUNK), 2, session="other")
    device.go(until=lambda: b.answers[other].end is not None)
    assert a.answers[long].end is None and a.loader.moved and a.pool.used < in_slabs
    assert not a.engine.core.scheduling.preemptions
    device.finish()


def test_memory_between_running_sequences_suffices_for_weights() -> None:
    """No sequence is preempted for a model that comes when half of each slab is free."""
    device = VirtualDevice(2, 24, weights=6)
    a, b = device.models
    names = [a.submit(random_prompt(random.Random(n), CHUNK), n, session=f"s{n}") for n in (20, 60)]
    device.go(until=lambda: a.answers[names[0]].end is not None)
    device.world.pass_(1.0)
    other = b.submit(random_prompt(random.Random(3), 2 * CHUNK), 2, session="other")
    device.go(until=lambda: b.answers[other].end is not None)
    assert a.answers[names[1]].end is None and not a.engine.core.scheduling.preemptions
    device.finish()
