"""Who may join a queue, and who leaves a full one: a flood gives way, and deciding costs the same however long the
queue is."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from contracts.request import GenerateRequest, Sampling
from tests.worker.test_core_fairness import Waiting
from worker.core.queue import Queue


def asked(tenant: str, priority: int = 0, weight: float = 1.0) -> GenerateRequest:
    return GenerateRequest("r", tenant, "s", "m", Sampling(), priority=priority, weight=weight)


def full(waiting: list[Waiting]) -> Queue[Waiting]:
    return Queue(waiting, lambda s: True, most=len(waiting))


def test_of_a_full_queue_the_one_that_fills_it_gives_up_its_youngest() -> None:
    flood = [Waiting(n, "a") for n in range(6)]
    assert full(flood).way(asked("b")) is flood[-1]
    assert full(flood).way(asked("a")) is False
    even = [*flood[:3], *(Waiting(9 + n, "b") for n in range(2))]
    assert full(even).way(asked("b")) is False, "both would have three"
    assert full(flood[:2]).way(asked("b", weight=0.1)) is False
    assert Queue[Waiting]([], lambda s: True, most=0).way(asked("b")) is False
    assert Queue(flood, lambda s: True, most=7).way(asked("a")) is True


def test_nobody_of_whom_something_was_heard_is_given_up() -> None:
    flood = [Waiting(n, "a") for n in range(6)]
    queue = Queue(flood, lambda s: s.arrival < 3, most=6)
    assert queue.way(asked("b")) is flood[2]


def test_less_urgent_ones_do_not_count_but_for_all_together() -> None:
    later = [Waiting(n, "a", priority=5) for n in range(4)]
    queue = Queue(later, lambda s: True, most=2)
    assert queue.way(asked("a")) is later[-1], "twice as many wait in all: the least urgent leaves"
    assert queue.way(asked("a", priority=5)) is False


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.booleans()), max_size=30),
    st.integers(0, 2),
    st.data(),
)
def test_what_has_joined_and_left_is_as_if_it_were_looked_at_anew(
    came: list[tuple[str, int, bool]], priority: int, data: st.DataObject
) -> None:
    queue, here = Queue[Waiting]([], lambda s: True, most=4), list[Waiting]()
    for n, (tenant, at, leaves) in enumerate(came):
        here.append(Waiting(n, tenant, priority=at))
        queue.joined(here[-1])
        if leaves:
            gone = here.pop(data.draw(st.integers(0, len(here) - 1)))
            queue.left(gone)
            queue.left(gone)
    for tenant in "abcd":
        assert queue.way(asked(tenant, priority)) is Queue(here, lambda s: True, most=4).way(asked(tenant, priority))


def test_a_decision_costs_little_however_many_wait() -> None:
    queue = full([Waiting(n, "ab"[n % 2], priority=n % 3) for n in range(2000)])
    began = time.process_time()
    for _ in range(200):
        queue.way(asked("c"))
    assert (time.process_time() - began) / 200 < 5e-4
