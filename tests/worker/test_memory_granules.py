"""Granules: each in one place, content where it was put, memory that follows what is mapped."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from worker.memory.granules import GranuleMisuse, HostPool, OutOfGranules
from worker.memory.tensors import bytes_at, tensor_at

G = 16 << 10


@pytest.fixture
def pool() -> Iterator[HostPool]:
    pool = HostPool(16 * G, G)
    yield pool
    pool.validate()
    pool.close()


def test_a_granule_keeps_its_content_when_it_moves_to_another_span(pool: HostPool) -> None:
    first, second = pool.reserve(4 * G), pool.reserve(4 * G)
    first.map(2, pool.take(1))
    bytes_at(first.address + 2 * G, G)[:] = 7
    second.map(0, first.unmap(2, 1))
    assert (bytes_at(second.address, G) == 7).all()
    assert pool.free == 15


def test_a_granule_that_was_given_back_comes_out_zero_and_its_memory_is_released(pool: HostPool) -> None:
    span = pool.reserve(16 * G)
    assert pool.resident_bytes() == 0
    span.map(0, pool.take(16))
    bytes_at(span.address, 16 * G)[:] = 0xFF
    assert pool.resident_bytes() == 16 * G
    pool.give(span.unmap(4, 8))
    assert pool.resident_bytes() == 8 * G
    span.map(4, pool.take(8))
    seen = bytes_at(span.address, 16 * G)
    assert (seen[4 * G : 12 * G] == 0).all() and (seen[: 4 * G] == 0xFF).all() and (seen[12 * G :] == 0xFF).all()


def test_taking_more_than_is_free_changes_nothing(pool: HostPool) -> None:
    taken = pool.take(10)
    with pytest.raises(OutOfGranules, match="7 granules") as caught:
        pool.take(7)
    assert isinstance(caught.value, MemoryError)
    assert pool.free == 6
    assert len({*taken, *pool.take(6)}) == 16


def test_a_span_may_be_far_larger_than_the_pool(pool: HostPool) -> None:
    span = pool.reserve(1 << 40)
    span.map((1 << 40) // G - 1, pool.take(1))
    bytes_at(span.address + (1 << 40) - G, G)[:] = 3
    assert pool.resident_bytes() == G


def test_misuse_is_refused_and_changes_nothing(pool: HostPool) -> None:
    one, two = pool.reserve(2 * G), pool.reserve(2 * G)
    [granule] = pool.take(1)
    one.map(0, [granule])
    with pytest.raises(GranuleMisuse, match="not held"):
        two.map(0, [granule])
    with pytest.raises(GranuleMisuse, match="not held"):
        pool.give([granule])
    with pytest.raises(GranuleMisuse, match="shows something"):
        one.map(0, pool.take(1))
    with pytest.raises(GranuleMisuse, match="outside"):
        one.map(1, [1, 2])
    with pytest.raises(GranuleMisuse, match="shows nothing"):
        one.unmap(0, 2)
    with pytest.raises(GranuleMisuse, match="twice"):
        pool.give([1, 1])
    assert one.mapped() == [(0, granule)] and two.mapped() == []


@pytest.mark.parametrize(("total", "granule"), [(G, 1000), (G + 1, G), (0, G), (G, 0)])
def test_sizes_that_do_not_fit_are_refused(total: int, granule: int) -> None:
    with pytest.raises(ValueError, match="multiple"):
        HostPool(total, granule)


def test_closing_a_span_gives_its_granules_back_once(pool: HostPool) -> None:
    span = pool.reserve(3 * G)
    span.map(0, pool.take(3))
    span.close()
    span.close()
    assert pool.free == 16 and pool.resident_bytes() == 0


def test_a_tensor_over_a_span_is_that_memory(pool: HostPool) -> None:
    span = pool.reserve(G)
    span.map(0, pool.take(1))
    tensor = tensor_at(span.address + 64, torch.bfloat16, [3, 5])
    tensor.copy_(torch.arange(15).view(3, 5))
    assert bytes_at(span.address + 64, 30).view(np.uint16).tolist() == tensor.view(torch.int16).flatten().tolist()
    assert (bytes_at(span.address, 64) == 0).all() and tensor[2, 4] == 14


class Traffic(RuleBasedStateMachine):
    """Granules move at random between the pool and three spans; a model in plain Python says what must be where."""

    @initialize()
    def begin(self) -> None:
        self.pool = HostPool(12 * G, G)
        self.spans = [self.pool.reserve(8 * G) for _ in range(3)]
        self.held: list[int] = []
        self.shown: dict[tuple[int, int], int] = {}
        self.content: dict[int, int] = {}
        self.stamp = 0

    @rule(count=st.integers(1, 6))
    def take(self, count: int) -> None:
        if count > self.pool.free:
            with pytest.raises(OutOfGranules):
                self.pool.take(count)
            return
        taken = self.pool.take(count)
        assert not set(taken) & (set(self.held) | set(self.shown.values()))
        self.content.update(dict.fromkeys(taken, 0))
        self.held += taken

    @precondition(lambda self: self.held)
    @rule(span=st.integers(0, 2), at=st.integers(0, 7), count=st.integers(1, 4), data=st.data())
    def show(self, span: int, at: int, count: int, data: st.DataObject) -> None:
        chosen = data.draw(st.permutations(self.held))[:count]
        places = [(span, p) for p in range(at, at + len(chosen))]
        if at + len(chosen) > 8 or any(p in self.shown for p in places):
            with pytest.raises(GranuleMisuse):
                self.spans[span].map(at, chosen)
            return
        self.spans[span].map(at, chosen)
        for place, granule in zip(places, chosen, strict=True):
            self.shown[place] = granule
            self.held.remove(granule)

    @rule(span=st.integers(0, 2), at=st.integers(0, 7), count=st.integers(1, 4))
    def hide(self, span: int, at: int, count: int) -> None:
        places = [(span, p) for p in range(at, at + count)]
        if any(p not in self.shown for p in places):
            with pytest.raises(GranuleMisuse):
                self.spans[span].unmap(at, count)
            return
        expected = [self.shown.pop(p) for p in places]
        assert self.spans[span].unmap(at, count) == expected
        self.held += expected

    @precondition(lambda self: self.held)
    @rule(count=st.integers(1, 4))
    def give(self, count: int) -> None:
        given, self.held = self.held[:count], self.held[count:]
        self.pool.give(given)
        for granule in given:
            del self.content[granule]

    @precondition(lambda self: self.shown)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        span, at = data.draw(st.sampled_from(sorted(self.shown)))
        self.stamp = self.stamp % 250 + 1
        bytes_at(self.spans[span].address + at * G, G)[:] = self.stamp
        self.content[self.shown[span, at]] = self.stamp

    @invariant()
    def everything_is_where_it_should_be(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.validate()
        assert self.pool.free + len(self.held) + len(self.shown) == self.pool.total
        assert {(s, at): g for s, span in enumerate(self.spans) for at, g in span.mapped()} == self.shown
        for (span, at), granule in self.shown.items():
            assert (bytes_at(self.spans[span].address + at * G, G) == self.content[granule]).all()
        assert len(self.shown) * G <= self.pool.resident_bytes() <= (len(self.shown) + len(self.held)) * G

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.pool.close()


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
