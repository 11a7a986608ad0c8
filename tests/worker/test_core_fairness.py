"""Tenants share by weight: who was served least goes next, nobody gains much by having been away, and nobody waits for
ever."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.request import GenerateRequest, Sampling
from worker.core.fairness import CREDIT_S, LATELY_S, Company, Group, Service, Shares, group_of, in_turns


@dataclass(eq=False)
class Waiting:
    """A request and what it takes, in seconds."""

    arrival: int
    tenant: str = "a"
    priority: int = 0
    weight: float = 1.0
    takes_s: float = 1.0
    pages: int = 1
    request: GenerateRequest = field(init=False)

    def __post_init__(self) -> None:
        self.request = GenerateRequest(
            f"r{self.arrival}", self.tenant, "s", "m", Sampling(), priority=self.priority, weight=self.weight
        )


def order(waiting: list[Waiting], service: Service | None = None) -> str:
    return "".join(s.tenant for s in in_turns(waiting, (service or Service()).of, lambda s: s.takes_s))


# ---- turns -----------------------------------------------------------------------------------------------------
def test_one_tenant_keeps_its_order_and_priorities_come_first() -> None:
    alone = [Waiting(n, takes_s=9 - n) for n in range(9)]
    assert in_turns(alone, Service().of, lambda s: s.takes_s) == alone
    mixed = [Waiting(0, "a", -1), Waiting(1, "a", -1), Waiting(2, "b", -1), Waiting(3, "c", 0), Waiting(4, "a", 0)]
    assert order(mixed) == "abaca"


def test_tenants_take_turns_by_weight_and_each_keeps_its_own_order() -> None:
    flood = [Waiting(n, "a") for n in range(8)]
    assert order([*flood, Waiting(8, "b"), Waiting(9, "b")]) == "ababaaaaaa"
    heavy = [Waiting(n, "a", weight=3.0) for n in range(9)] + [Waiting(9 + n, "b") for n in range(3)]
    assert Counter(order(heavy)[:8]) == {"a": 6, "b": 2}
    costly = [Waiting(n, "a", takes_s=4.0) for n in range(2)] + [Waiting(2 + n, "b") for n in range(6)]
    assert order(costly) == "abbbbabb"


def test_who_was_served_less_goes_first_and_who_comes_back_has_little_credit() -> None:
    service, a, b = Service(), (0, "a"), (0, "b")
    service.seen([a], [a])
    service.charge(a, 100.0, 1.0)
    service.seen([a, b], [a, b])
    assert service.of(b) == 100 - CREDIT_S, "it asked for nothing before"
    service.charge(a, 5.0, 1.0)
    assert order([Waiting(0, "a"), Waiting(1, "b")], service) == "ba"
    service.seen([a], [a])
    service.seen([a, b], [a, b])
    assert service.of(b) == 105 - CREDIT_S, "nor while it was away"
    service.charge(b, 50.0, 1.0)
    service.seen([a], [a])
    service.seen([a, b], [a, b])
    assert service.of(b) == 155 - CREDIT_S, "but what it was served beyond others it still was"
    service.seen([], [])
    assert service.of(a) == service.of(b) == 0, "an idle device owes nobody anything"


def test_what_was_served_while_nobody_waited_is_no_debt() -> None:
    service, a, b = Service(), (0, "a"), (0, "b")
    service.seen([a], [a])
    service.seen([a], [])  # it only decodes
    service.charge(a, 1000.0, 1.0)
    service.seen([a, b], [b])
    assert service.of(b) == 1000 - CREDIT_S
    service.charge(b, 1.0, 1.0)
    service.seen([a, b], [a, b])
    assert service.of(a) == 1001 - 2 * CREDIT_S


def test_what_is_remembered_is_bounded_by_who_is_here() -> None:
    service = Service()
    a = (0, "a")
    for n in range(1000):
        service.seen([a, (0, f"t{n}")], [a, (0, f"t{n}")])
        service.charge(a, 1.0, 1.0)
    assert len(service._served) <= 65, "they have no debts"
    for n in range(12_000):
        service.charge((0, f"t{n}"), 1e6, 1.0)
    service.seen([a], [a])
    assert len(service._served) == 10_000 and service.of(a)
    service.validate()


@given(st.integers(0, 1 << 32), st.lists(st.sampled_from([0.25, 1.0, 3.0]), min_size=2, max_size=5))
@settings(max_examples=60, deadline=None)
def test_under_contention_service_is_by_weight_and_nobody_waits_for_ever(seed: int, weights: list[float]) -> None:
    """One place. All but tenant 0 always have requests of up to 4 s; tenant 0 has one now and then."""
    dice, service, now_s = random.Random(seed), Service(), 0.0
    tenants = [f"t{n}" for n in range(len(weights))]
    queues: dict[str, list[Waiting]] = {t: [] for t in tenants}
    served: Counter[str] = Counter()
    came_s: dict[Waiting, float] = {}
    longest_s, arrival = 0.0, 0
    lone_s = sum(4.0 * w / weights[0] + 4.0 for w in weights)  # what all others may be served before it is its turn
    for _ in range(600):
        for n, tenant in enumerate(tenants):
            while len(queues[tenant]) < (3 if n else dice.random() < 0.1):
                made = Waiting(arrival, tenant, 0, weights[n], dice.choice([0.1, 1.0, 4.0]))
                arrival, came_s[made] = arrival + 1, now_s
                queues[tenant].append(made)
        waiting = [s for queue in queues.values() for s in queue]
        groups: set[Group] = {group_of(s) for s in waiting}
        service.seen(groups, groups)
        s = in_turns(sorted(waiting, key=lambda s: s.arrival), service.of, lambda s: s.takes_s)[0]
        queues[s.tenant].remove(s)
        now_s += s.takes_s
        service.charge(group_of(s), s.takes_s, s.weight)
        served[s.tenant] += s.takes_s  # type: ignore[assignment]
        if s.tenant == tenants[0]:
            longest_s = max(longest_s, now_s - s.takes_s - came_s[s])
        service.validate()
    assert longest_s <= lone_s
    per_weight = [served[t] / w for t, w in zip(tenants[1:], weights[1:], strict=True)]
    assert max(per_weight) - min(per_weight) <= 2 * 4.0 / min(weights)


# ---- places ----------------------------------------------------------------------------------------------------
def shares(here: list[Waiting], waiting: list[Waiting], places: int = 8, pages: int = 80) -> Shares:
    groups = {group_of(s): s.request.weight for s in [*here, *waiting]}
    return Shares(here, groups, places, pages, lambda s: s.pages)


def test_a_tenant_alone_holds_nothing_beyond_its_share() -> None:
    flood = [Waiting(n, pages=10) for n in range(8)]
    alone = shares(flood, [Waiting(9), Waiting(10, "b", priority=1)])
    assert not alone.beyond and not alone.claims(Waiting(9), 1)


def test_what_a_tenant_holds_beyond_its_share_gives_way_to_one_that_has_little() -> None:
    flood, other = [Waiting(n) for n in range(8)], Waiting(8, "b")
    full = shares(flood, [other])
    assert full.beyond == set(flood[4:]) and full.claims(other, 1) and not full.claims(Waiting(9), 1)
    half = shares([*flood[:6], *(Waiting(20 + n, "b") for n in range(2))], [other])
    assert half.beyond == set(flood[4:6]) and not half.claims(other, 1), "so that nobody is sent back and forth"
    weighty = shares(flood, [Waiting(8, "b", weight=3.0)])
    assert weighty.beyond == set(flood[2:])


def test_pages_count_as_places_do_and_the_oldest_sequence_of_a_tenant_always_stays() -> None:
    giant, second, other = Waiting(0, pages=60), Waiting(1, pages=10), Waiting(2, "b")
    made = shares([giant, second], [other])
    assert made.beyond == {second} and made.claims(other, 40) and not made.claims(other, 41)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 30)), max_size=12), st.integers(1, 30))
def test_who_gave_way_cannot_take_the_place_back(held: list[tuple[str, int]], need: int) -> None:
    here = [Waiting(n, tenant, pages=pages) for n, (tenant, pages) in enumerate(held)]
    newcomer = Waiting(99, "d", pages=need)
    before = shares(here, [newcomer])
    if not (before.beyond and before.claims(newcomer, need)):
        return
    victim = max(before.beyond, key=lambda s: s.arrival)
    assert isinstance(victim, Waiting)
    after = shares([s for s in here if s is not victim] + [newcomer], [victim])
    assert newcomer not in after.beyond


# ---- short steps -----------------------------------------------------------------------------------------------
def test_a_tenant_has_company_while_another_one_may_come_back() -> None:
    company = Company()
    company.seen([(0, "a")], 0.0)
    assert not company.has((0, "a")) and not company.has((1, "a")), "it is alone"
    company.seen([(0, "b"), (2, "c")], 1.0)
    assert company.has((0, "a")) and company.has((1, "a"))
    assert company.has((2, "c")) and not company.has((-1, "a")), "the others are less urgent"
    company.seen([(0, "a")], 1.0 + LATELY_S)
    assert company.has((0, "a")), "b may come back at any moment"
    company.seen([(0, "a")], 1.1 + LATELY_S)
    assert not company.has((0, "a"))
