"""Granules: each in one place, content where it was put, memory that follows what is mapped."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.worker.virtual_memory import HostVirtualMemory
from worker.memory.cuda_driver import CudaDriver, CudaError
from worker.memory.cuda_memory import CudaPool
from worker.memory.granules import GranuleMisuse, GranulePool, HostPool, OutOfGranules
from worker.memory.tensors import tensor_at

#: The granule on the host, and CUDA's.
G, CUDA_G = 16 << 10, 2 << 20
Make = Callable[[int], GranulePool]


def _on_cuda(granules: int) -> GranulePool:
    return CudaPool(CudaDriver(), granules * CUDA_G, CUDA_G, torch.device("cuda", 0))


#: Every kind of pool, made with so many granules: the host's, CUDA's over the host's system calls, and CUDA's.
POOLS: dict[str, Make] = {
    "host": lambda granules: HostPool(granules * G, G),
    "cuda-rules": lambda granules: CudaPool(HostVirtualMemory(), granules * G, G, torch.device("cpu")),
    "cuda": _on_cuda,
}
_KINDS = ["host", "cuda-rules", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=_KINDS)
def pool(request: pytest.FixtureRequest) -> Iterator[GranulePool]:
    pool = POOLS[request.param](16)
    yield pool
    pool.validate()
    pool.close()


def seen(pool: GranulePool, address: int, count: int) -> torch.Tensor:
    """uint8 `[count]`, on the pool's device."""
    return tensor_at(address, torch.uint8, [count], pool.device)


def test_a_granule_keeps_its_content_when_it_moves_to_another_span(pool: GranulePool) -> None:
    G = pool.granule_bytes
    first, second = pool.reserve(4 * G), pool.reserve(4 * G)
    first.map(2, pool.take(1))
    seen(pool, first.address + 2 * G, G)[:] = 7
    second.map(0, first.unmap(2, 1))
    assert (seen(pool, second.address, G) == 7).all()
    assert pool.free == 15


def test_a_granule_that_was_given_back_comes_out_zero_and_its_memory_is_released(pool: GranulePool) -> None:
    G = pool.granule_bytes
    span = pool.reserve(16 * G)
    assert pool.resident_bytes() == 0
    span.map(0, pool.take(16))
    seen(pool, span.address, 16 * G)[:] = 0xFF
    assert pool.resident_bytes() == 16 * G
    pool.give(span.unmap(4, 8))
    assert pool.resident_bytes() == 8 * G
    span.map(4, pool.take(8))
    now = seen(pool, span.address, 16 * G)
    assert (now[4 * G : 12 * G] == 0).all() and (now[: 4 * G] == 0xFF).all() and (now[12 * G :] == 0xFF).all()


def test_taking_more_than_is_free_changes_nothing(pool: GranulePool) -> None:
    taken = pool.take(10)
    with pytest.raises(OutOfGranules, match="7 granules") as caught:
        pool.take(7)
    assert isinstance(caught.value, MemoryError)
    assert pool.free == 6
    assert len({*taken, *pool.take(6)}) == 16


def test_a_span_may_be_far_larger_than_the_pool(pool: GranulePool) -> None:
    G = pool.granule_bytes
    span = pool.reserve(1 << 40)
    span.map((1 << 40) // G - 1, pool.take(1))
    seen(pool, span.address + (1 << 40) - G, G)[:] = 3
    assert pool.resident_bytes() == G


def test_misuse_is_refused_and_changes_nothing(pool: GranulePool) -> None:
    G = pool.granule_bytes
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
    with pytest.raises(ValueError, match="multiple"):
        CudaPool(HostVirtualMemory(), total, granule, torch.device("cpu"))


def test_closing_a_span_gives_its_granules_back_once(pool: GranulePool) -> None:
    G = pool.granule_bytes
    span = pool.reserve(3 * G)
    span.map(0, pool.take(3))
    span.close()
    span.close()
    assert pool.free == 16 and pool.resident_bytes() == 0


def test_a_tensor_over_a_span_is_that_memory(pool: GranulePool) -> None:
    G = pool.granule_bytes
    span = pool.reserve(G)
    span.map(0, pool.take(1))
    tensor = tensor_at(span.address + 64, torch.bfloat16, [3, 5], pool.device)
    tensor.copy_(torch.arange(15).view(3, 5))
    assert torch.equal(seen(pool, span.address + 64, 30).view(torch.bfloat16), tensor.flatten())
    assert (seen(pool, span.address, 64) == 0).all() and tensor[2, 4] == 14


def test_what_the_driver_refuses_changes_nothing() -> None:
    driver = HostVirtualMemory(most=3 * G)
    pool = CudaPool(driver, 4 * G, G, torch.device("cpu"))
    span = pool.reserve(4 * G)
    taken = pool.take(4)
    driver.settle()
    with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
        span.map(0, taken)
    assert span.mapped() == [] and driver.mapped == {} and pool.resident_bytes() == 0
    span.map(1, taken[:3])
    pool.validate()
    assert (seen(pool, span.address + G, 3 * G) == 0).all()
    pool.close()


def test_a_granule_is_hidden_only_when_the_device_is_done_and_nothing_is_left_at_the_end() -> None:
    driver = HostVirtualMemory()
    pool = CudaPool(driver, 4 * G, G, torch.device("cpu"))
    span = pool.reserve(4 * G)
    span.map(0, pool.take(3))
    span.unmap(1, 1)
    assert driver.settled == 1 and len(driver.sizes) == 3
    pool.close()
    assert not driver.sizes and not driver.mapped and not driver.ranges


class Traffic(RuleBasedStateMachine):
    """Granules move at random between the pool and three spans; a model in plain Python says what must be where."""

    kind = "host"

    @initialize()
    def begin(self) -> None:
        self.pool = POOLS[self.kind](12)
        self.spans = [self.pool.reserve(8 * self.pool.granule_bytes) for _ in range(3)]
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
        self.shown_bytes(span, at)[:] = self.stamp
        self.content[self.shown[span, at]] = self.stamp

    @invariant()
    def everything_is_where_it_should_be(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.validate()
        assert self.pool.free + len(self.held) + len(self.shown) == self.pool.total
        assert {(s, at): g for s, span in enumerate(self.spans) for at, g in span.mapped()} == self.shown
        for (span, at), granule in self.shown.items():
            assert (self.shown_bytes(span, at) == self.content[granule]).all()
        assert (
            len(self.shown) * self.pool.granule_bytes
            <= self.pool.resident_bytes()
            <= (len(self.shown) + len(self.held)) * self.pool.granule_bytes
        )

    def shown_bytes(self, span: int, at: int) -> torch.Tensor:
        return seen(self.pool, self.spans[span].address + at * self.pool.granule_bytes, self.pool.granule_bytes)

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.pool.close()


class TrafficByCudaRules(Traffic):
    kind = "cuda-rules"


class TrafficOnCuda(Traffic):
    kind = "cuda"


TestTraffic = Traffic.TestCase
TestTrafficByCudaRules = TrafficByCudaRules.TestCase
TestTrafficOnCuda = pytest.mark.gpu(TrafficOnCuda.TestCase)
for _case in (TestTraffic, TestTrafficByCudaRules, TestTrafficOnCuda):
    _case.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
