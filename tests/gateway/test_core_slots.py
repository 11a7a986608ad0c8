"""Who is answered next when all slots are taken, over every order of asking, ending and giving up."""

from __future__ import annotations

from collections import Counter, deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from contracts.errors import IllegalTransition
from gateway.core.slots import Place, Slots

WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5}


def slots(limit: int, share: float = 1.0, queue: int = 0) -> Slots:
    return Slots(limit, queue or limit, share, lambda tenant: WEIGHTS.get(tenant, 1.0))


def taken(s: Slots, tenant: str, priority: int = 0) -> Place:
    place = s.ask(tenant, priority)
    assert place is not None
    return place


def test_a_free_slot_is_had_at_once_and_one_tenant_cannot_have_them_all() -> None:
    s = slots(4, 0.5)
    assert [taken(s, "a").state for _ in range(3)] == ["held", "held", "waiting"]
    assert [taken(s, "x").state for _ in range(3)] == ["held", "held", "waiting"]
    s.validate()


def test_a_slot_goes_to_whoever_waits_and_holds_the_fewest_for_its_weight() -> None:
    s = slots(6)
    held = {tenant: [taken(s, tenant) for _ in range(n)] for tenant, n in (("a", 2), ("b", 3), ("x", 1))}
    wait = {tenant: taken(s, tenant) for tenant in ("a", "b")}
    assert s.leave(held["x"][0]) == [wait["b"]], "1.5 for its weight, and a has 2"
    assert s.leave(held["a"][0]) == [wait["a"]]


def test_a_tenant_with_many_requests_does_not_delay_one_with_few() -> None:
    s = slots(2)
    first = [taken(s, "a") for _ in range(2)]
    flood = [taken(s, "a") for _ in range(2)]
    assert s.ask("a", 0) is None, "no more may wait"
    assert s.ask("x", 0) is None, "nor of anybody, where a share is all"
    s.leave(flood[1])
    late = taken(s, "x")
    assert s.leave(first[0]) == [late]


def test_the_queue_is_shared_too_so_that_a_flood_leaves_room_for_others() -> None:
    s = slots(4, 0.5)
    assert [s.ask("a", 0) is None for _ in range(6)] == [False] * 4 + [True] * 2
    assert [s.ask("x", 0) is None for _ in range(6)] == [False] * 4 + [True] * 2


def test_of_one_tenants_requests_the_urgent_go_first_and_then_the_oldest() -> None:
    s = slots(6)
    held = [taken(s, "a") for _ in range(6)]
    asked = [taken(s, "a", priority) for priority in (0, 5, -3, 0, -3)]
    assert [s.leave(place)[0] for place in held[:5]] == [asked[i] for i in (2, 4, 0, 3, 1)]


def test_urgency_of_one_tenant_is_nothing_to_another() -> None:
    s = slots(2)
    held = [taken(s, "a"), taken(s, "a")]
    taken(s, "a", -1000)
    other = taken(s, "x", 1000)
    assert s.leave(held[0]) == [other]


def test_who_gives_up_waits_no_longer_and_who_leaves_twice_is_told() -> None:
    s = slots(1)
    held, waits = taken(s, "a"), taken(s, "x")
    assert s.leave(waits) == [] and s.leave(held) == []
    with pytest.raises(IllegalTransition):
        s.leave(held)
    assert s.held.held == s.queued.held == 0


@pytest.mark.parametrize("limit", [1, 2, 7, 14])
def test_who_always_wants_more_gets_slots_by_weight_and_nobody_waits_for_ever(limit: int) -> None:
    s, served, running = slots(limit, queue=100), Counter[str](), deque[Place]()
    for _ in range(limit):
        running.append(taken(s, "b"))
    for _ in range(20):
        for tenant in WEIGHTS:
            taken(s, tenant)
    for turn in range(7_000):
        for let_in in s.leave(running.popleft()):
            running.append(let_in)
            served[let_in.tenant] += turn >= 70
            taken(s, let_in.tenant)
        s.validate()
    # Of two slots nobody gets both while a third waits for the first.
    near = 0.3 if limit == 2 else 0.1
    assert served["a"] / served["c"] == pytest.approx(2.0, rel=near) and served["b"] / served["a"] == pytest.approx(
        2.0, rel=near
    )


class SlotsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.s, self.places = slots(4, 0.5), list[Place]()

    @rule(tenant=st.sampled_from("abcx"), priority=st.integers(-2, 2))
    def ask(self, tenant: str, priority: int) -> None:
        place = self.s.ask(tenant, priority)
        if place is None:
            assert self.s.held.held == 4 or self.s.held.of(tenant) == 2
        else:
            self.places.append(place)

    @precondition(lambda self: self.places)
    @rule(which=st.integers(0, 100))
    def end_or_give_up(self, which: int) -> None:
        place = self.places.pop(which % len(self.places))
        was = place.state
        let_in = self.s.leave(place)
        assert len(let_in) <= 1 and (was == "held" or not let_in)
        assert all(p in self.places and p.state == "held" for p in let_in)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "s"):
            self.s.validate()
            assert sum(p.state == "held" for p in self.places) == self.s.held.held

    def teardown(self) -> None:
        for place in getattr(self, "places", ()):
            self.s.leave(place)
        if hasattr(self, "s"):
            assert self.s.held.held == self.s.queued.held == 0


TestSlots = SlotsMachine.TestCase
TestSlots.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
