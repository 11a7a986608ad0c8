"""The ledger of pages and blocks: what it hands out, and what leaves first."""

from __future__ import annotations

import time
from typing import NoReturn

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from contracts.ids import SessionKey
from contracts.memory.victim_order import Rank
from worker.core.block import NO_PAGE, Block, SaveState
from worker.core.hbm import HbmCache
from worker.core.lacking import lacking
from worker.core.pages import PagePool

LAYERS = 4
A, B, C, URGENT = (SessionKey("t", name) for name in ("a", "b", "c", "urgent"))


def cached(
    cache: HbmCache,
    key: bytes,
    session: SessionKey,
    index: int = 0,
    used_s: float = 0.0,
    save: SaveState = SaveState.BELOW,
) -> Block:
    block = cache.new_block(index, session, range(LAYERS))
    cache.standings.used(session, used_s)
    block.ready[:] = True
    cache.mark(block, save)
    assert cache.enter(block, key)
    return block


def make(pages: int = 16) -> HbmCache:
    return HbmCache(PagePool(slab_count=pages // 4, pages_per_slab=4, layers=LAYERS))


def here(block: Block) -> list[int]:
    return [int(layer) for layer in np.flatnonzero(block.pages != NO_PAGE)]


def test_last_layers_leave_first_across_sessions() -> None:
    cache = make(8)
    old, new = cached(cache, b"old", A, used_s=1), cached(cache, b"new", B, used_s=2)
    assert cache.make_room(2, now=3)
    assert here(old) == [0, 1, 2] and here(new) == [0, 1, 2]
    assert cache.make_room(3, now=3)
    assert here(old) == [0, 1] and here(new) == [0, 1, 2]
    cache.validate()


def test_without_layer_priority_whole_chunks_leave_oldest_first() -> None:
    cache = make(8)
    cache.layer_priority = False
    old, new = cached(cache, b"old", A, used_s=1), cached(cache, b"new", B, used_s=2)
    assert cache.make_room(4, now=3)
    assert here(old) == [] and len(here(new)) == 4


def test_the_beginning_of_a_prefix_outlives_its_end() -> None:
    cache = make(8)
    first, last = cached(cache, b"1", A, index=0), cached(cache, b"2", A, index=1)
    assert cache.make_room(1, now=1)
    assert len(here(first)) == 4 and len(here(last)) == 3


def test_withdrawn_goes_before_unadvised_before_advised_before_urgent() -> None:
    cache = make(16)
    for session, priority in ((A, 0), (B, 0), (URGENT, -5)):
        cache.standings.advise(session, priority, 100, 0)
    cache.standings.withdraw(B)
    advised, withdrawn, plain = cached(cache, b"a", A), cached(cache, b"b", B), cached(cache, b"c", C)
    urgent = cached(cache, b"u", URGENT)
    for expected in (withdrawn, plain, advised, urgent):
        assert len(here(expected)) == 4
        assert cache.make_room(cache.pool.free + 4, now=1)
        assert here(expected) == []
    assert cache.purged == {Rank.DROPPED: 4, Rank.UNADVISED: 4, Rank.ADVISED: 8}


def test_an_expired_advisory_only_lowers_the_rank() -> None:
    cache = make(8)
    cache.standings.advise(A, 0, 10, 0)
    assert cache.standings.of(A, now=9)[0] == Rank.ADVISED
    assert cache.standings.of(A, now=10)[0] == Rank.DROPPED


@pytest.mark.parametrize("hold", ["users", "moving", "waiting"])
def test_what_is_held_never_leaves_and_a_vain_attempt_changes_nothing(hold: str) -> None:
    cache = make(8)
    held, free = cached(cache, b"held", A), cached(cache, b"free", B)
    if hold == "users":
        cache.use(held)
    elif hold == "moving":
        cache.pin(held)
    else:
        cache.mark(held, SaveState.WAITING)
    assert not cache.make_room(5, now=2)
    assert len(here(held)) == len(here(free)) == 4
    assert cache.make_room(4, now=2)
    assert len(here(held)) == 4 and here(free) == []


def test_what_could_not_be_saved_is_dropped_first() -> None:
    cache = make(8)
    refused, below = cached(cache, b"r", A, used_s=9, save=SaveState.REFUSED), cached(cache, b"b", B, used_s=1)
    assert cache.make_room(4, now=10)
    assert here(refused) == [] and len(here(below)) == 4


def test_a_prefetch_displaces_only_what_ranks_under_it() -> None:
    cache = make(8)
    for session in (A, B):
        cache.standings.advise(session, 0, 100, 0)
    block = cached(cache, b"a", A)
    cached(cache, b"c", B)
    assert not cache.make_room(1, now=1, below=(Rank.ADVISED, 0, -3)), "layer 3 may not push out another layer 3"
    assert cache.make_room(2, now=1, below=(Rank.ADVISED, 0, -2)), "layer 2 may push out the layers 3"
    assert here(block) == [0, 1, 2]


def test_an_incomplete_idle_block_gives_way_to_a_new_one_of_the_same_chunk() -> None:
    cache = make(8)
    cached(cache, b"k", A)
    assert cache.make_room(5, now=1)
    fresh = cache.new_block(0, B, range(LAYERS))
    fresh.ready[:] = True
    cache.use(fresh)
    assert cache.enter(fresh, b"k") and cache.index[b"k"] is fresh
    cache.validate()


def test_a_lost_block_is_not_matched_and_leaves_with_its_last_user() -> None:
    cache = make(8)
    block = cached(cache, b"k", A)
    cache.use(block)
    cache.lose(block)
    assert b"k" not in cache.index and len(here(block)) == 4
    cache.release(block)
    assert cache.pool.free == 8


def test_an_erased_session_leaves_what_is_only_its_saved_or_not_and_what_runs_when_it_ends() -> None:
    cache = make(16)
    shared, own, unsaved, running = (cached(cache, key, A) for key in (b"s", b"o", b"u", b"r"))
    cache.want(shared, B)
    cache.mark(unsaved, SaveState.REFUSED)
    cache.use(running)
    cache.forget({A})
    assert set(cache.index) == {b"s"} and list(shared.sessions) == [B]
    assert cache.pool.free == 8 and not own.held
    cache.release(running)
    assert cache.pool.free == 12
    cache.forget({B})
    assert cache.pool.free == 16 and not cache.index


def test_an_erasure_looks_at_its_sessions_blocks_and_at_no_others() -> None:
    class Unwalked(dict[bytes, Block]):
        def items(self) -> NoReturn:
            raise AssertionError("all of HBM was walked")

        __iter__ = keys = values = items  # type: ignore[assignment]

    cache = make(64)
    for n in range(10):
        cached(cache, b"b%d" % n, B)
    cached(cache, b"a", A)
    whole = cache.index
    cache.index = Unwalked(whole)
    cache.forget({A})
    assert b"a" not in cache.index and len(cache.index) == 10 and cache._owners.of({A}) == []
    cache.index = {b"b%d" % n: cache.index[b"b%d" % n] for n in range(10)}
    cache.validate()


@given(st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=200))
@settings(max_examples=50, deadline=None)
def test_pages_are_handed_out_once_and_all_come_back(steps: list[tuple[int, bool]]) -> None:
    pool = PagePool(slab_count=6, pages_per_slab=5, layers=8)
    mine: list[int] = []
    for layer, give in steps:
        if give and mine:
            pool.give([mine.pop(layer % len(mine))])
        elif pool.free:
            of_band = [s for s in pool._slabs.values() if s.free and s.band == pool.band_of(layer)]
            fullest = min(((len(s.free), s.number) for s in of_band), default=None)
            page = pool.take(layer)
            assert fullest is None or page // 5 == fullest[1]
            assert page not in mine
            mine.append(page)
        else:
            with pytest.raises(MemoryError):
                pool.take(layer)
        pool.validate()
    pool.give(mine)
    assert pool.free == pool.total == 30
    pool.validate()


@given(st.lists(st.tuples(st.integers(0, 7), st.sampled_from(["take", "give", "limit", "execute"])), max_size=200))
@settings(max_examples=100, deadline=None)
def test_a_pool_holds_no_more_slabs_than_its_limit_once_what_is_beyond_it_is_empty(
    steps: list[tuple[int, str]],
) -> None:
    pool, mapped = PagePool(slab_count=6, pages_per_slab=5, layers=8), set[int]()
    mine: list[int] = []
    for number, what in steps:
        free, held = pool.free, pool.held
        if what == "give" and mine:
            pool.give([mine.pop(number % len(mine))])
        elif what == "limit":
            pool.set_limit(min(number, 6))
            assert pool.held <= max(held, pool.limit)
        elif what == "execute":
            mapped = (mapped - set(pool.to_unmap)) | set(pool.to_map)
            pool.to_map, pool.to_unmap = [], []
            assert len(mapped) == pool.held
        elif what == "take" and free:
            mine.append(pool.take(number))
            assert pool.free == free - 1
        elif what == "take":
            with pytest.raises(MemoryError):
                pool.take(number)
        pool.validate()
    pool.give(mine)
    pool.validate()
    assert pool.held <= pool.limit and pool.free == pool.total == 5 * pool.limit


def test_a_page_of_many_half_empty_slabs_is_found_at_once() -> None:
    pool = PagePool(slab_count=4000, pages_per_slab=2, layers=4, bands=1)
    pages = [pool.take(0) for _ in range(8000)]
    pool.give(pages[::2])
    began = time.process_time()
    assert len([pool.take(0) for _ in range(4000)]) == 4000 and not pool.free
    assert time.process_time() - began < 0.5, "looking at every slab for every page takes two seconds"


def test_a_slab_beyond_the_limit_gives_its_memory_back_when_its_last_page_is_free() -> None:
    pool = PagePool(slab_count=3, pages_per_slab=2, layers=1)
    pages = [pool.take(0) for _ in range(5)]
    pool.set_limit(1)
    assert pool.held == 3 and pool.free == 1 and pool.to_map == [0, 1, 2]
    pool.to_map = []
    pool.give([pages[4]])
    assert pool.held == 2 and pool.to_unmap == [2] and pool.free == 0
    pool.give([pages[0], pages[2], pages[3]])
    assert pool.held == 1 and pool.to_unmap == [2, 1] and pool.free == 1
    pool.set_limit(3)
    assert pool.free == 5
    with pytest.raises(ValueError, match="0 to 3 slabs, got 4"):
        pool.set_limit(4)


def test_bands_of_layers_fill_slabs_of_their_own() -> None:
    pool = PagePool(slab_count=8, pages_per_slab=4, layers=8)
    slabs = {layer: {pool.take(layer) // 4 for _ in range(2)} for layer in (0, 1, 6, 7)}
    assert slabs[0] == slabs[1] and slabs[6] == slabs[7] and not slabs[0] & slabs[7]
    assert sorted(pool.to_map) == sorted(slabs[0] | slabs[7])


class CacheMachine(RuleBasedStateMachine):
    """Random use of the cache; the invariants hold after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = make(32)
        self.used: list[Block] = []
        self.now = 0.0

    @rule(
        key=st.integers(0, 9),
        session=st.sampled_from([A, B, C]),
        save=st.sampled_from([SaveState.BELOW, SaveState.REFUSED, SaveState.WAITING]),
    )
    def compute(self, key: int, session: SessionKey, save: SaveState) -> None:
        self.now += 1
        if not self.cache.make_room(LAYERS, self.now):
            return
        block = self.cache.new_block(key, session, range(LAYERS))
        self.cache.use(block)
        self.cache.standings.used(session, self.now)
        block.ready[:] = True
        if self.cache.enter(block, bytes([key])):
            self.cache.mark(block, save)
        self.used.append(block)

    @rule(key=st.integers(0, 9))
    def match(self, key: int) -> None:
        block = self.cache.index.get(bytes([key]))
        if block is not None:
            gaps = [int(layer) for layer in np.flatnonzero(block.pages == NO_PAGE)]
            self.cache.use(block)
            if self.cache.make_room(len(gaps), self.now):
                self.cache.fill(block, gaps)
                block.ready[gaps] = True
                self.used.append(block)
            else:
                self.cache.release(block)

    @precondition(lambda self: self.used)
    @rule(i=st.integers(0, 99))
    def let_go(self, i: int) -> None:
        self.cache.release(self.used.pop(i % len(self.used)))

    @rule(key=st.integers(0, 9), save=st.sampled_from([SaveState.BELOW, SaveState.REFUSED]))
    def saved(self, key: int, save: SaveState) -> None:
        block = self.cache.index.get(bytes([key]))
        if block is not None and block.save is SaveState.WAITING:
            self.cache.mark(block, save)
            self.cache.settle(block)

    @rule(key=st.integers(0, 9))
    def erase(self, key: int) -> None:
        self.cache.erase(bytes([key]))

    @rule(session=st.sampled_from([A, B, C]))
    def forget(self, session: SessionKey) -> None:
        self.cache.forget({session})
        assert not any(session in block.sessions for block in self.cache.index.values())

    @rule(keys=st.lists(st.integers(0, 9), unique=True), more=st.integers(0, 3))
    def what_is_lacking(self, keys: list[int], more: int) -> None:
        cache, chain = self.cache, [bytes([key]) for key in keys]
        predicted = lacking(cache, chain, len(keys) + more)
        matched = cache.match(chain, A)
        pages = sum(map(len, cache.windowed.gaps(matched, 0))) + (len(keys) + more - len(matched)) * LAYERS
        assert predicted == pages - cache.obtainable
        for block in matched:
            cache.release(block)

    @rule(pages=st.integers(1, 32))
    def purge(self, pages: int) -> None:
        before = self.cache.pool.free
        if self.cache.make_room(pages, self.now):
            assert self.cache.pool.free >= pages
        else:
            assert self.cache.pool.free == before

    @invariant()
    def holds(self) -> None:
        self.cache.validate(self.used)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
