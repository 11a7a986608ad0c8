"""A device's memory: each granule in one place and with one owner, content where it was put, memory that follows what
is mapped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.worker.owners import KV, WEIGHTS
from tests.worker.virtual_memory import HostVirtualMemory
from worker.core.granules import GranuleMisuse, GranuleState, OutOfGranules, Owner
from worker.memory.cuda_driver import CudaDriver, CudaError
from worker.memory.cuda_memory import cuda_memory
from worker.memory.device_memory import DeviceMemory, host_memory
from worker.memory.preparing import Preparing
from worker.memory.tensors import tensor_at

#: The granule on the host, and CUDA's.
G, CUDA_G = 16 << 10, 2 << 20
Make = Callable[[int], DeviceMemory]


def _on_cuda(granules: int) -> DeviceMemory:
    return cuda_memory(CudaDriver(), granules * CUDA_G, CUDA_G, torch.device("cuda", 0))


#: Every kind of pool, made with so many granules: the host's, CUDA's over the host's system calls, and CUDA's.
POOLS: dict[str, Make] = {
    "host": lambda granules: host_memory(granules * G, G),
    "cuda-rules": lambda granules: cuda_memory(HostVirtualMemory(), granules * G, G, torch.device("cpu")),
    "cuda": _on_cuda,
}
_KINDS = ["host", "cuda-rules", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=_KINDS)
def pool(request: pytest.FixtureRequest) -> Iterator[DeviceMemory]:
    pool = POOLS[request.param](16)
    yield pool
    pool.validate()
    pool.close()


def seen(pool: DeviceMemory, address: int, count: int) -> torch.Tensor:
    """uint8 `[count]`, on the pool's device."""
    return tensor_at(address, torch.uint8, [count], pool.device)


def test_a_granule_keeps_its_content_when_it_moves_to_another_span(pool: DeviceMemory) -> None:
    G = pool.granule_bytes
    first, second = pool.reserve(4 * G, KV), pool.reserve(4 * G, KV)
    first.map(2, pool.take(1, KV))
    seen(pool, first.address + 2 * G, G)[:] = 7
    second.map(0, first.unmap(2, 1))
    assert (seen(pool, second.address, G) == 7).all()
    assert pool.free == 15


def test_a_granule_goes_to_another_owner_with_its_content_and_only_then(pool: DeviceMemory) -> None:
    G = pool.granule_bytes
    weights, kv = pool.reserve(2 * G, WEIGHTS), pool.reserve(2 * G, KV)
    weights.map(0, pool.take(1, WEIGHTS))
    seen(pool, weights.address, G)[:] = 9
    lent = weights.unmap(0, 1)
    with pytest.raises(GranuleMisuse, match="for weights of model, not for kv of model; hand it over first"):
        kv.map(0, lent)
    pool.hand(lent, KV)
    kv.map(1, lent)
    assert (seen(pool, kv.address + G, G) == 9).all()
    assert pool.ledger.owned(KV) == 1 and pool.ledger.owned(WEIGHTS) == 0
    with pytest.raises(GranuleMisuse, match="not held: it is mapped"):
        pool.hand(lent, WEIGHTS)


def test_a_warm_granule_keeps_its_memory_and_is_taken_first_until_it_is_cooled(pool: DeviceMemory) -> None:
    G = pool.granule_bytes
    span = pool.reserve(8 * G, KV)
    span.map(0, pool.take(4, KV))
    kept = span.unmap(2, 2)
    pool.give(kept, keep=True)
    assert pool.free == 14 and pool.ledger.warm == 2 and pool.resident_bytes() == 4 * G
    again = pool.take(3, KV)
    assert set(kept) < set(again) and pool.ledger.warm == 0
    pool.give(again, keep=True)
    assert pool.cool(8) == 3 and pool.resident_bytes() == 2 * G
    span.map(2, pool.take(2, KV))
    assert (seen(pool, span.address + 2 * G, 2 * G) == 0).all()


def test_prepared_granules_are_warm_until_all_free_ones_are(pool: DeviceMemory) -> None:
    G = pool.granule_bytes
    span = pool.reserve(16 * G, KV)
    span.map(0, pool.take(14, KV))
    assert pool.prepare() and pool.ledger.warm == 1 and pool.resident_bytes() == 15 * G
    pool.validate()
    assert pool.prepare() and not pool.prepare()
    assert pool.ledger.warm == pool.free == 2 and pool.resident_bytes() == 16 * G
    span.map(14, pool.take(2, KV))
    seen(pool, span.address, 16 * G)[:] = 5
    assert pool.resident_bytes() == 16 * G


def test_a_retired_place_is_used_again_only_when_it_is_unmapped_and_its_granule_at_once(pool: DeviceMemory) -> None:
    G = pool.granule_bytes
    first, second = pool.reserve(4 * G, KV), pool.reserve(4 * G, KV)
    hide, waits = pool.physical.hide, threading.Event()

    def late(address: int, count: int) -> None:
        waits.wait(10)
        hide(address, count)

    pool.physical.hide = late  # type: ignore[method-assign]
    first.map(0, pool.take(2, KV))
    seen(pool, first.address, G)[:] = 7
    left = first.retire(0, 2)
    assert not first.mapped() and pool.free == 14
    second.assign(0, left)
    second.show(0, 2)
    assert (seen(pool, second.address, G) == 7).all(), "its content went along"
    first.assign(0, pool.take(1, KV))
    showing = threading.Thread(target=first.show, args=(0, 1))
    showing.start()
    showing.join(0.05)
    assert showing.is_alive()
    waits.set()
    showing.join(10)
    assert not showing.is_alive()
    seen(pool, first.address, G)[:] = 9
    assert (seen(pool, second.address, G) == 7).all()


def test_usage_names_every_byte_and_what_lies_beside_the_granules(pool: DeviceMemory) -> None:
    G = pool.granule_bytes
    span = pool.reserve(4 * G, WEIGHTS)
    span.map(0, pool.take(3, WEIGHTS))
    pool.take(2, KV)
    pool.give(span.unmap(0, 1), keep=True)
    pool.count_beside(KV, "graphs", lambda: 77)
    usage = pool.usage()
    assert usage == {
        ("", "", "free"): 11 * G,
        ("", "", "warm"): G,
        ("weights", "model", "mapped"): 2 * G,
        ("kv", "model", "held"): 2 * G,
        ("kv", "model", "graphs"): 77,
    }
    shares = {(share.use, share.name): share.bytes_ for share in pool.shares()}
    assert shares == {("free", ""): 11 * G, ("warm", ""): G, ("weights", "model"): 2 * G, ("kv", "model"): 2 * G}


def test_a_granule_that_was_given_back_comes_out_zero_and_its_memory_is_released(pool: DeviceMemory) -> None:
    G = pool.granule_bytes
    span = pool.reserve(16 * G, KV)
    assert pool.resident_bytes() == 0
    span.map(0, pool.take(16, KV))
    seen(pool, span.address, 16 * G)[:] = 0xFF
    assert pool.resident_bytes() == 16 * G
    pool.give(span.unmap(4, 8))
    assert pool.resident_bytes() == 8 * G
    span.map(4, pool.take(8, KV))
    now = seen(pool, span.address, 16 * G)
    assert (now[4 * G : 12 * G] == 0).all() and (now[: 4 * G] == 0xFF).all() and (now[12 * G :] == 0xFF).all()


def test_taking_more_than_is_free_changes_nothing(pool: DeviceMemory) -> None:
    taken = pool.take(10, KV)
    with pytest.raises(OutOfGranules, match="7 granules") as caught:
        pool.take(7, KV)
    assert isinstance(caught.value, MemoryError)
    assert pool.free == 6
    assert len({*taken, *pool.take(6, KV)}) == 16


def test_a_span_may_be_far_larger_than_the_pool(pool: DeviceMemory) -> None:
    G = pool.granule_bytes
    span = pool.reserve(1 << 40, KV)
    span.map((1 << 40) // G - 1, pool.take(1, KV))
    seen(pool, span.address + (1 << 40) - G, G)[:] = 3
    assert pool.resident_bytes() == G


def test_misuse_is_refused_and_changes_nothing(pool: DeviceMemory) -> None:
    G = pool.granule_bytes
    one, two = pool.reserve(2 * G, KV), pool.reserve(2 * G, KV)
    [granule] = pool.take(1, KV)
    one.map(0, [granule])
    with pytest.raises(GranuleMisuse, match="not held"):
        two.map(0, [granule])
    with pytest.raises(GranuleMisuse, match="not held"):
        pool.give([granule])
    with pytest.raises(GranuleMisuse, match="shows something"):
        one.map(0, pool.take(1, KV))
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
        host_memory(total, granule)
    with pytest.raises(ValueError, match="multiple"):
        cuda_memory(HostVirtualMemory(), total, granule, torch.device("cpu"))


def test_closing_a_span_gives_its_granules_back_once(pool: DeviceMemory) -> None:
    G = pool.granule_bytes
    span = pool.reserve(3 * G, KV)
    span.map(0, pool.take(3, KV))
    span.close()
    span.close()
    assert pool.free == 16 and pool.resident_bytes() == 0


def test_a_tensor_over_a_span_is_that_memory(pool: DeviceMemory) -> None:
    G = pool.granule_bytes
    span = pool.reserve(G, KV)
    span.map(0, pool.take(1, KV))
    tensor = tensor_at(span.address + 64, torch.bfloat16, [3, 5], pool.device)
    tensor.copy_(torch.arange(15).view(3, 5))
    assert torch.equal(seen(pool, span.address + 64, 30).view(torch.bfloat16), tensor.flatten())
    assert (seen(pool, span.address, 64) == 0).all() and tensor[2, 4] == 14


def test_what_the_driver_refuses_changes_nothing() -> None:
    driver = HostVirtualMemory(most=3 * G)
    pool = cuda_memory(driver, 4 * G, G, torch.device("cpu"))
    span = pool.reserve(4 * G, KV)
    taken = pool.take(4, KV)
    driver.settle()
    with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
        span.map(0, taken)
    assert span.mapped() == [] and driver.mapped == {} and pool.resident_bytes() == 0
    span.map(1, taken[:3])
    pool.validate()
    assert (seen(pool, span.address + G, 3 * G) == 0).all()
    pool.close()


def test_preparing_stops_at_its_bound_and_for_good_where_there_is_no_memory() -> None:
    driver = HostVirtualMemory(most=4 * G)
    pool = cuda_memory(driver, 8 * G, G, torch.device("cpu"))
    preparing = Preparing(pool, ahead_bytes=3 * G + 1)
    assert [preparing.turn() for _ in range(4)] == [True, True, True, False]
    assert pool.ledger.warm == 3 and len(driver.sizes) == 3
    span = pool.reserve(8 * G, KV)
    span.map(0, pool.take(2, KV))
    assert [preparing.turn() for _ in range(3)] == [True, False, False]
    assert pool.ledger.warm == 2 and pool.resident_bytes() == 4 * G
    pool.validate()
    span.close()
    assert not preparing.turn(), "it does not ask a system again that had nothing"
    pool.close()
    assert not driver.sizes


def test_a_granule_is_hidden_only_when_the_device_is_done_and_nothing_is_left_at_the_end() -> None:
    driver = HostVirtualMemory()
    pool = cuda_memory(driver, 4 * G, G, torch.device("cpu"))
    span = pool.reserve(4 * G, KV)
    span.map(0, pool.take(3, KV))
    span.unmap(1, 1)
    assert driver.settled == 1 and len(driver.sizes) == 3
    pool.close()
    assert not driver.sizes and not driver.mapped and not driver.ranges


#: What a granule holds that was prepared.
UNDEFINED = -1


class Traffic(RuleBasedStateMachine):
    """Granules move at random between the pool and three spans; a model in plain Python says what must be where."""

    kind = "host"

    @initialize()
    def begin(self) -> None:
        self.pool = POOLS[self.kind](12)
        self.spans = [self.pool.reserve(8 * self.pool.granule_bytes, owner) for owner in (KV, KV, WEIGHTS)]
        self.held: list[int] = []
        self.owner: dict[int, Owner] = {}
        self.warm: dict[int, int] = {}  # with what they hold
        self.shown: dict[tuple[int, int], int] = {}
        self.content: dict[int, int] = {}
        self.stamp = 0

    @rule(count=st.integers(1, 6), owner=st.sampled_from((KV, WEIGHTS)))
    def take(self, count: int, owner: Owner) -> None:
        if count > self.pool.free:
            with pytest.raises(OutOfGranules):
                self.pool.take(count, owner)
            return
        taken = self.pool.take(count, owner)
        assert not set(taken) & (set(self.held) | set(self.shown.values()))
        assert len(self.warm.keys() - set(taken)) == max(len(self.warm) - count, 0), "warm ones come first"
        for granule in taken:
            self.content[granule] = self.warm.pop(granule, 0)
            self.owner[granule] = owner
        self.held += taken

    @precondition(lambda self: self.held)
    @rule(span=st.integers(0, 2), at=st.integers(0, 7), count=st.integers(1, 4), data=st.data())
    def show(self, span: int, at: int, count: int, data: st.DataObject) -> None:
        chosen = data.draw(st.permutations(self.held))[:count]
        places = [(span, p) for p in range(at, at + len(chosen))]
        foreign = any(self.owner[granule] != self.spans[span].owner for granule in chosen)
        if at + len(chosen) > 8 or foreign or any(p in self.shown for p in places):
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
    @rule(count=st.integers(1, 4), keep=st.booleans())
    def give(self, count: int, keep: bool) -> None:
        given, self.held = self.held[:count], self.held[count:]
        self.pool.give(given, keep=keep)
        for granule in given:
            content = self.content.pop(granule)
            del self.owner[granule]
            if keep:
                self.warm[granule] = content

    @rule(count=st.integers(1, 4))
    def cool(self, count: int) -> None:
        assert self.pool.cool(count) == min(count, len(self.warm))
        self.warm = {
            granule: content
            for granule, content in self.warm.items()
            if self.pool.ledger.state(granule) is GranuleState.WARM
        }

    @rule()
    def prepare(self) -> None:
        known = set(self.warm)
        assert self.pool.prepare() == (self.pool.free > len(known))
        warm = {g for g in range(self.pool.total) if self.pool.ledger.state(g) is GranuleState.WARM}
        self.warm |= dict.fromkeys(warm - known, UNDEFINED)

    @precondition(lambda self: self.held)
    @rule(count=st.integers(1, 4), owner=st.sampled_from((KV, WEIGHTS)))
    def hand(self, count: int, owner: Owner) -> None:
        self.pool.hand(self.held[:count], owner)
        self.owner |= dict.fromkeys(self.held[:count], owner)

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
        assert self.pool.ledger.warm == len(self.warm)
        for owner in (KV, WEIGHTS):
            assert self.pool.ledger.owned(owner) == sum(each == owner for each in self.owner.values())
        assert {(s, at): g for s, span in enumerate(self.spans) for at, g in span.mapped()} == self.shown
        for (span, at), granule in self.shown.items():
            if self.content[granule] != UNDEFINED:
                assert (self.shown_bytes(span, at) == self.content[granule]).all()
        assert (
            len(self.shown) * self.pool.granule_bytes
            <= self.pool.resident_bytes()
            <= (len(self.shown) + len(self.held) + len(self.warm)) * self.pool.granule_bytes
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
