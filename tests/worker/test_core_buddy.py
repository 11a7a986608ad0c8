"""Places of small tensors: disjoint, joined again, lowest first."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from worker.core.buddy import BLOCK_BYTES, LEAST_BYTES, BuddyMisuse, BuddyPool

K = 1 << 10


def test_a_place_is_the_least_power_of_two_and_the_lowest() -> None:
    pool = BuddyPool(1)
    assert [pool.alloc(each) for each in (1, 2 * K, 2 * K + 1, 2 * K)] == [0, 2 * K, 4 * K, 8 * K]
    assert [pool.place_bytes(offset) for offset in (0, 2 * K, 4 * K)] == [2 * K, 2 * K, 4 * K]
    pool.free(2 * K)
    assert pool.alloc(10) == 2 * K
    pool.validate()


def test_all_that_is_freed_is_one_block_again() -> None:
    pool = BuddyPool(1)
    places = [pool.alloc(LEAST_BYTES) for _ in range(BLOCK_BYTES // LEAST_BYTES)]
    assert pool.alloc(1) is None, "the pool is full"
    for offset in places:
        assert offset is not None
        pool.free(offset)
    assert pool.alloc(BLOCK_BYTES) == 0
    pool.validate()


def test_what_does_not_fit_changes_nothing() -> None:
    pool = BuddyPool(2)
    first = pool.alloc(1)
    assert pool.alloc(BLOCK_BYTES) == BLOCK_BYTES and pool.alloc(BLOCK_BYTES) is None
    assert pool.fragmentation().free_bytes == BLOCK_BYTES - LEAST_BYTES
    assert first == 0 and pool.alloc(1) == LEAST_BYTES
    pool.validate()


def test_it_says_how_much_is_lost_to_rounding_and_to_pieces() -> None:
    pool = BuddyPool(1)
    places = [pool.alloc(3 * K) for _ in range(BLOCK_BYTES // (4 * K))]
    for offset in places[::2]:
        assert offset is not None
        pool.free(offset)
    said = pool.fragmentation()
    assert (said.asked_bytes, said.held_bytes) == (len(places) // 2 * 3 * K, BLOCK_BYTES // 2)
    assert said.wasted_bytes == said.held_bytes // 4
    assert (said.free_bytes, said.largest_free_bytes) == (BLOCK_BYTES // 2, 4 * K)
    assert said.most_held_bytes == BLOCK_BYTES


def test_a_place_is_freed_once_and_only_by_its_offset() -> None:
    pool = BuddyPool(1)
    pool.alloc(8 * K)
    for offset in (2 * K, -1, 16 * K):
        with pytest.raises(BuddyMisuse, match="held"):
            pool.free(offset)
    pool.free(0)
    with pytest.raises(BuddyMisuse, match="no place at 0"):
        pool.free(0)
    with pytest.raises(BuddyMisuse):
        pool.place_bytes(0)


@pytest.mark.parametrize("bytes_", [0, -1, BLOCK_BYTES + 1])
def test_what_is_no_small_tensor_is_refused(bytes_: int) -> None:
    with pytest.raises(ValueError, match="whole blocks"):
        BuddyPool(4).alloc(bytes_)


def test_taking_and_freeing_for_long_keeps_no_more_than_the_pool() -> None:
    pool = BuddyPool(1)
    for _ in range(20_000):
        offset = pool.alloc(LEAST_BYTES)
        assert offset == 0
        pool.free(offset)
    assert sum(len(heap) for heap in pool._heaps) < 500
    pool.validate()


class Machine(RuleBasedStateMachine):
    """Against a map of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BuddyPool(3)
        self.held: dict[int, int] = {}

    @rule(bytes_=st.one_of(st.integers(1, 16 * K), st.integers(1, BLOCK_BYTES)))
    def alloc(self, bytes_: int) -> None:
        offset = self.pool.alloc(bytes_)
        if offset is None:
            assert self.pool.fragmentation().largest_free_bytes < bytes_
            return
        end = offset + self.pool.place_bytes(offset)
        assert end - offset >= bytes_ and (end - offset < 2 * bytes_ or end - offset == LEAST_BYTES)
        assert all(end <= other or offset >= other + size for other, size in self.held.items()), "disjoint"
        assert offset >= 0 and end <= 3 * BLOCK_BYTES
        self.held[offset] = end - offset

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.held)))
        self.pool.free(offset)
        del self.held[offset]

    @precondition(lambda self: not self.held)
    @rule()
    def is_whole(self) -> None:
        assert self.pool.fragmentation().largest_free_bytes == BLOCK_BYTES

    @invariant()
    def holds(self) -> None:
        self.pool.validate()
        assert self.pool.fragmentation().held_bytes == sum(self.held.values())


TestMachine = Machine.TestCase
