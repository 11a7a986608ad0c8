"""Hints of several tenants take turns, and each tenant's keep their order."""

from __future__ import annotations

import random

from gateway.hint_queue import HintQueue


def test_whoever_invalidates_after_every_advisory_delays_others_by_one_round() -> None:
    queue: HintQueue[str, str] = HintQueue(10_000, 0.5)
    for number in range(1000):
        assert queue.advise("a", f"a{number}") and queue.invalidate("a", f"-a{number}")
    assert queue.advise("b", "b0") and queue.invalidates
    first, second = queue.next(512), queue.next(512)
    assert (first.advisories, first.invalidations) == (["a0", "b0"], ["-a0"])
    assert (second.advisories, second.invalidations) == (["a1"], ["-a1"])


def test_a_tenant_fills_its_share_and_no_more() -> None:
    queue: HintQueue[int, int] = HintQueue(100, 0.5)
    assert [queue.advise("a", number) for number in range(60)] == [True] * 50 + [False] * 10
    assert not queue.invalidate("a", 0) and not queue.invalidates
    assert all(queue.advise("b", number) for number in range(50))
    assert len(queue) == 100
    assert len(queue.next(30).advisories) == 30 and queue.invalidate("a", 0)
    queue.validate()


def test_every_tenants_hints_are_sent_in_their_order() -> None:
    draw, queue = random.Random(7), HintQueue[tuple[str, int], tuple[str, int]](200, 0.4)
    put: dict[str, list[int]] = {tenant: [] for tenant in "abc"}
    sent: dict[str, list[int]] = {tenant: [] for tenant in "abc"}
    for number in range(5000):
        tenant = draw.choice("aab" if number % 2 else "abc")
        if (queue.invalidate if draw.random() < 0.3 else queue.advise)(tenant, (tenant, number)):
            put[tenant].append(number)
        if number % 7 == 0 or number > 4000:
            made = queue.next(draw.randrange(1, 9))
            for owner, one in made.advisories + made.invalidations:
                sent[owner].append(one)
            queue.validate()
    while queue:
        made = queue.next(8)
        for owner, one in made.advisories + made.invalidations:
            sent[owner].append(one)
    assert sent == put
