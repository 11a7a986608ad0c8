"""Hints: what is told to the stores and when, who is believed, and which hints move."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.ids import SessionKey
from contracts.turn_times import Phase
from scheduler.core.advisories import MOVES, Advisories, Hint, Pending, in_order, merged
from scheduler.core.control import Ask, Command, Control, Prefetch, Settings, Withdraw
from scheduler.core.decisions import KEPT_OF_ONE, Decision, Decisions
from scheduler.core.fleet import LoadReport, Rates
from scheduler.core.moves import LOOKS
from scheduler.core.trust import DOUBT_PRIORITY, Trust, Worth
from tests.scheduler.test_core import MODEL, Harness, S, hint


def session(name: object) -> SessionKey:
    return SessionKey("t", f"s{name}")


def advise(
    h: Control, now: float, key: SessionKey = S, ttl_s: float = 60.0, lead_s: float | None = None, **more: Any
) -> list[Command]:
    arrival_s = None if lead_s is None else now + lead_s
    expires_s = (now if arrival_s is None else arrival_s) + ttl_s
    return h.advise(hint(key, f"a{key}{now}", arrival_s=arrival_s, expires_s=expires_s, **more), now)


def alive(h: Control, now: float, **work: float) -> None:
    """Every node reports; those that are named (node_0=3.0) so much work."""
    for name in h.fleet.devices:
        h.fleet.loaded(name, LoadReport(outstanding_s=work.get(name.replace("-", "_"), 0.0)), [], [], now)


# ---- one session, several hints


def test_a_user_who_types_for_minutes_sends_for_the_cache_once_and_then_only_as_its_rank_runs_out() -> None:
    h, told = Harness(), []
    for beat in range(60):
        now = 4.0 * beat
        alive(h, now)
        told += [(now, c) for c in advise(h, now)]
        h.validate()
    assert all(isinstance(c, Prefetch) for _, c in told) and len({c.node for _, c in told}) == 1
    times = [now for now, _ in told]
    assert times[0] == 0.0 and len(times) <= 240 / 30 + 1, (
        "a command for each half of a life of 60 s, not for each of 60 hints"
    )
    gaps = [later - sooner for sooner, later in pairwise(times)]
    assert max(gaps) < 60.0, "the store's rank never runs out meanwhile"
    assert h.hints == {"full": len(times), "known": 60 - len(times)}


def test_a_store_is_told_again_of_more_urgency_or_of_an_earlier_arrival_but_not_of_a_later_one() -> None:
    h = Harness()
    assert len(advise(h, 0.0, lead_s=20.0)) == 1
    assert not advise(h, 0.0, lead_s=30.0) and not advise(h, 0.0, lead_s=19.5)
    (sooner,) = advise(h, 0.0, lead_s=10.0)
    assert isinstance(sooner, Prefetch) and sooner.hint.arrival_s == 10.0
    (urgent,) = advise(h, 0.0, lead_s=15.0, priority=-2)
    assert isinstance(urgent, Prefetch) and (urgent.hint.priority, urgent.hint.arrival_s) == (-2, 10.0)
    assert not advise(h, 0.0, priority=5), "the most urgent of the session's hints counts"


def test_hints_of_one_session_merge_to_the_earliest_the_most_urgent_and_the_longest() -> None:
    old = hint(arrival_s=10.0, expires_s=100.0, priority=3, pin="node-1", model="m")
    new = hint(advisory_id="a2", arrival_s=20.0, expires_s=50.0, priority=-1, model="")
    assert merged(old, new, 5.0) == hint(
        advisory_id="a2", arrival_s=10.0, expires_s=100.0, priority=-1, pin="node-1", model="m"
    )
    assert merged(old, new, 15.0).arrival_s == 20.0, "what was expected before has not happened"
    assert merged(new, hint(arrival_s=None), 25.0).arrival_s is None


def test_a_second_hint_stays_with_the_first_ones_node_unless_that_is_gone() -> None:
    h = Harness()
    advise(h, 0.0)
    first = h.advisories.get(S)
    assert first is not None
    h.fleet.placed(first.node, "r1", 0.0)
    advise(h, 1.0)
    again = h.advisories.get(S)
    assert again is not None and again.node == first.node
    h.worker_left(first.node)
    withdraw, prefetch = advise(h, 2.0)
    assert isinstance(withdraw, Withdraw) and withdraw.node == first.node
    assert isinstance(prefetch, Prefetch) and prefetch.node != first.node


def test_hints_that_come_together_are_placed_by_urgency_then_by_expected_arrival() -> None:
    wanted = [
        hint(session(0), priority=-1, arrival_s=9.0),
        hint(session(1), arrival_s=3.0),
        hint(session(2)),
        hint(session(3), arrival_s=8.0),
        hint(session(4), priority=2, arrival_s=3.0),
    ]
    assert in_order(wanted[::-1], 5.0) == wanted


def test_a_sessions_own_hint_does_not_drive_its_turn_away() -> None:
    h = Harness()
    h.fleet.request_s = 10.0
    advise(h, 0.0)
    pending = h.advisories.get(S)
    assert pending is not None
    assert h.place(Ask("r", S, "m"), 1.0).node == pending.node
    h.validate()


def queue(h: Harness, node: str, requests: int) -> None:
    """So many requests were placed there, of which nothing was reported yet."""
    for number in range(requests):
        h.fleet.placed(node, f"queued-{number}", 0.0)


def announce(h: Harness, node: str, hints: int) -> None:
    """So many other sessions have hints there."""
    for number in range(hints):
        h.advisories.place(Pending(hint(session(f"other-{number}"), f"o{number}"), node, 0.0))


def test_a_hint_with_little_time_goes_where_the_cache_can_be_by_then() -> None:
    h = Harness()
    h.fleet.request_s = 0.05
    h.hold("node-0", 960)  # 0.1 s on the link
    announce(h, "node-0", 8)
    for lead_s, node in ((10.0, "node-1"), (0.01, "node-0")):
        advise(h, 0.0, lead_s=lead_s)
        pending = h.advisories.get(S)
        assert pending is not None and pending.node == node
        h.withdraw(S, "t", "")


def test_a_turn_that_comes_right_after_its_hint_does_not_take_the_cache_for_there() -> None:
    h = Harness()
    h.hold("node-0", 960)
    h.fleet.request_s = 0.05
    queue(h, "node-0", 7)
    announce(h, "node-0", 8)
    advise(h, 0.0)
    assert h.place(Ask("r2", S, "m"), 0.01).node == "node-0", (
        "0.09 s of loading are left, counted eight times, and the queue is 0.35 s"
    )
    h = Harness()
    h.hold("node-0", 960)
    h.fleet.request_s = 0.05
    queue(h, "node-0", 7)
    announce(h, "node-0", 8)
    advise(h, 0.0)
    assert h.place(Ask("r2", S, "m"), 0.2).node == "node-1"


def test_when_hints_are_too_many_the_tenant_that_has_most_of_them_loses_its_oldest() -> None:
    a = Advisories(most=4)
    a.place(Pending(Hint(SessionKey("small", "x"), "a"), "node-0", 0.0))
    for i in range(9):
        a.place(Pending(Hint(SessionKey("flood", f"s{i}"), f"a{i}"), "node-0", 0.0))
        a.validate()
    assert a.get(SessionKey("small", "x")) is not None and a.get(SessionKey("flood", "s8")) is not None
    assert len(a) == 4 and a.outcomes["dropped"] == 6


def test_the_store_forgets_a_hint_that_is_dropped_for_others() -> None:
    h = Harness()
    h.advisories._most = 3
    [first], *_ = [advise(h, 0.1 * number, session(number)) for number in range(3)]
    withdrawn, brought = advise(h, 1.0, session(3))
    h.validate()
    assert withdrawn == Withdraw(first.node, session(0))
    assert isinstance(brought, Prefetch) and brought.hint.session == session(3)


# ---- trust


def test_whoever_lies_is_fetched_for_later_and_then_not_at_all_and_is_believed_again_when_it_is_true_again() -> None:
    t, seen = Trust(1e6, 1e6), []
    for _ in range(400):
        t.ended("t", "liar", 0.0)
        if t.worth("t", "liar") not in seen[-1:]:
            seen.append(t.worth("t", "liar"))
    for _ in range(400):
        t.ended("t", "liar", 1.0)
        if t.worth("t", "liar") is not seen[-1]:
            seen.append(t.worth("t", "liar"))
        t.validate()
    assert seen == [Worth.FULL, Worth.BEHIND, Worth.NOTED, Worth.BEHIND, Worth.FULL]


def test_one_address_that_lies_does_not_spoil_its_tenants_name_but_many_do() -> None:
    t = Trust(1e6, 1e6)
    for _ in range(3000):
        t.ended("t", "liar", 0.0)
    assert t.worth("t", "liar") is Worth.NOTED and t.worth("t", "honest") is Worth.FULL
    for i in range(3000):
        t.ended("t", f"liar-{i}", 0.0)
    assert t.worth("t", "honest") is Worth.NOTED and t.worth("u", "honest") is Worth.FULL


def test_budgets_are_of_the_tenant_and_of_each_address_and_fill_as_trust_allows() -> None:
    t = Trust(per_s=10.0, burst=5.0)
    assert [t.take("t", "a", 0.0) for _ in range(6)] == [True] * 5 + [False]
    assert not t.take("t", "b", 0.0), "the tenant has none left"
    assert t.take("u", "a", 0.0)
    assert sum(t.take("t", "b", 0.5) for _ in range(9)) == 4, "0.5 s at 10 a second and a chance of 0.9"


def test_a_long_cache_takes_as_much_of_the_budgets_as_several_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    t = Trust(per_s=10.0, burst=10.0)
    assert t.take("t", "a", 0.0, 131_072) and [t.take("t", "b", 0.0) for _ in range(3)] == [True, True, False]
    assert t.take("u", "a", 0.0, 1 << 20) and not t.take("u", "a", 0.0), "it may overdraw"
    assert not t.take("u", "a", 5.0) and t.take("u", "a", 7.0)

    h, asked = Harness(), []
    monkeypatch.setattr(h.trust, "take", lambda *given: asked.append(given[3]) or True)
    h.hold("node-0", 960)
    advise(h, 0.0)
    assert asked == [960]


@given(st.lists(st.tuples(st.sampled_from(["", "a", "b"]), st.sampled_from([0.0, 0.5, 1.0])), max_size=300))
@settings(max_examples=60, deadline=None)
def test_a_chance_is_a_chance_and_no_caller_is_worth_more_than_its_tenant(ends: list[tuple[str, float]]) -> None:
    t = Trust(1.0, 3.0)
    for address, true in ends:
        t.ended("t", address, true)
        t.validate()
        assert 0.0 <= t.chance("t", address) <= t.chance("t", "") + 1e-9


def test_hints_that_are_renewed_for_ever_are_found_out() -> None:
    h = Harness()
    for beat in range(700):
        now = 4.0 * beat
        alive(h, now)
        for i in range(20):
            advise(h, now, session(i), address="liar")
        h.tick(now)
    assert len(h.advisories) == 20 and h.trust.worth("t", "liar") is Worth.NOTED
    assert h.trust.worth("t", "honest") is Worth.FULL


def flooded() -> Harness:
    """A fleet, and a tenant's address whose hints never come true."""
    h = Harness()
    for _ in range(150):
        h.trust.ended("t", "liar", 0.0)
    return h


def test_a_hint_of_a_doubtful_caller_is_sent_behind_those_of_others_and_one_of_a_liar_is_only_remembered() -> None:
    h = Harness()
    while h.trust.worth("t", "liar") is Worth.FULL:
        h.trust.ended("t", "liar", 0.0)
    (behind,) = advise(h, 0.0, address="liar", priority=-3)
    assert isinstance(behind, Prefetch) and behind.hint.priority == DOUBT_PRIORITY - 3
    while h.trust.worth("t", "liar") is not Worth.NOTED:
        h.trust.ended("t", "liar", 0.0)
    assert not advise(h, 0.0, session(2), address="liar")
    assert h.hints == {"behind": 1, "noted": 1}
    assert (h.fleet.columns.expected.sum()) < 0.5, "nobody keeps away from a node for its sake"
    (other,) = advise(h, 0.0, session(3), address="honest")
    assert isinstance(other, Prefetch) and other.hint.priority == 0


def test_a_liars_turn_is_placed_as_everybodys() -> None:
    h, honest = flooded(), Harness()
    for one in (h, honest):
        one.hold("node-0", 960)
        alive(one, 0.0, node_0=0.05)
    assert h.place(Ask("r", S, "m"), 0.0).choice == honest.place(Ask("r", S, "m"), 0.0).choice


def test_a_liar_is_believed_again_once_its_requests_come_although_nothing_was_fetched_for_them() -> None:
    h, told = flooded(), []
    for i in range(100):
        told.append(bool(advise(h, float(i), session(i), address="liar")))
        alive(h, float(i))
        h.place(Ask(f"r{i}", session(i), "m"), float(i))
    assert not told[0] and told[-1] and told == sorted(told)
    assert h.trust.worth("t", "liar") is Worth.FULL


def test_a_flood_is_followed_as_far_as_the_budget_goes() -> None:
    h = Control(Settings(hints_per_s=10.0, hint_burst=20.0))
    h.fleet.worker_joined("node-0", "w", (MODEL,), 0.0)
    h.fleet.store_joined("node-0", "s")
    told = sum(len(advise(h, i / 1000, session(i), address="a")) for i in range(2000))
    assert 20 <= told <= 20 + 2 * 10


# ---- moving


def busy(work_s: float, *, lead_s: float | None = None, rates: Rates | None = None) -> tuple[Harness, str, str]:
    """A hint, whose node then gets so much work; the node and the other one."""
    h = Harness()
    for name in h.fleet.devices:
        h.fleet.worker_joined(name, "w", (MODEL,), 0.0, rates)
    h.hold("node-0", 960)
    advise(h, 0.0, lead_s=lead_s)
    pending = h.advisories.get(S)
    assert pending is not None and pending.node == "node-0"
    alive(h, 1.0, node_0=work_s)
    return h, "node-0", "node-1"


def test_a_hint_leaves_a_node_that_has_far_more_to_do_and_no_other() -> None:
    h, here, there = busy(10.5)
    withdraw, prefetch = h.tick(1.0)
    assert isinstance(withdraw, Withdraw) and withdraw.node == here
    assert isinstance(prefetch, Prefetch) and (prefetch.node, prefetch.sources) == (there, (here,))
    assert h.advisories.outcomes["moved"] == 1
    assert busy(3.0)[0].tick(1.0) == []
    h.validate()


def test_a_hint_stays_when_its_cache_would_be_late_elsewhere_unless_its_node_is_gone() -> None:
    slow = Rates(link_bytes_per_s=1e6, blob_bytes_per_s=1e6)  # 94 s
    h, here, there = busy(500.0, lead_s=30.0, rates=slow)
    assert h.tick(1.0) == []
    h.worker_left(here)
    assert [c.node for c in h.tick(3.0)] == [here, there]


def test_a_pinned_hint_never_moves() -> None:
    h = Harness()
    advise(h, 0.0, pin="node-0")
    h.worker_left("node-0")
    assert h.tick(1.0) == []


def test_a_doubtful_callers_hint_stays_behind_where_it_moves_to() -> None:
    h = Harness()
    while h.trust.worth("t", "liar") is Worth.FULL:
        h.trust.ended("t", "liar", 0.0)
    (first,) = advise(h, 0.0, address="liar")
    h.worker_left(first.node)
    _, moved = h.tick(1.0)
    assert isinstance(moved, Prefetch) and moved.hint.priority == DOUBT_PRIORITY


def test_few_hints_are_looked_at_each_time_and_all_after_a_while() -> None:
    h = Harness(3)
    for i in range(5 * LOOKS):
        advise(h, 0.0, session(i), pin="" if i else "node-0")
    here = max(h.fleet.devices, key=h.advisories.on_node)
    there = h.advisories.on_node(here)
    h.worker_left(here)
    for step in range(5):
        alive(h, 1.0 + step)
        h.worker_left(here)
        assert len(h.tick(1.0 + step)) <= 2 * LOOKS
        h.validate()
    assert there > LOOKS and h.advisories.on_node(here) <= 1, "all but the pinned one"


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0, 30)), min_size=1, max_size=40))
@settings(max_examples=100, deadline=None)
def test_a_hint_moves_twice_at_most_and_never_back(loads: list[tuple[int, float]]) -> None:
    h = Harness(3)
    advise(h, 0.0, ttl_s=1e6)
    path = [p.node for p in [h.advisories.get(S)] if p is not None]
    for step, (node, work) in enumerate(loads):
        now = 2.5 * (step + 1)
        alive(h, now, **{f"node_{node}": work})
        h.tick(now)
        h.validate()
        pending = h.advisories.get(S)
        assert pending is not None
        if pending.node != path[-1]:
            path.append(pending.node)
    assert len(path) <= 1 + MOVES and len(set(path)) == len(path)


# ---- what is remembered of it


def test_what_was_decided_for_a_session_is_remembered_with_its_scores() -> None:
    h, here, there = busy(10.5)
    h.tick(1.0)
    placed = h.place(Ask("r1", S, "m"), 4.0)
    turn, move, first = h.explained.of(S)
    assert (first.what, first.node, first.worth) == ("hint", here, "full")
    assert (move.what, move.node, move.moves, move.sources) == ("move", there, 1, (here,))
    assert (turn.what, turn.node, turn.request_id, turn.hinted) == ("turn", placed.node, "r1", True)
    assert (turn.prefetched, turn.prefetched_s) == (there, 3.0)
    assert turn.choice == placed.choice
    assert dict(move.choice.scores)[there]["load_s"] > 0.0


@pytest.mark.parametrize("sessions", [1, 7, 50])
def test_decisions_are_bounded_and_the_latest_stay(sessions: int) -> None:
    kept = Decisions(kept=20)
    for i in range(100):
        kept.note(session(i % sessions), Decision("turn", float(i), "node-0"))
        kept.validate()
    assert min(20, KEPT_OF_ONE * sessions) - KEPT_OF_ONE < len(kept) <= 20, "a session's go together"
    assert kept.of(session(99 % sessions))[0].at_s == 99.0


def test_where_a_turns_time_went_joins_its_decision_and_nothing_else() -> None:
    kept = Decisions(kept=20)
    for what, request_id in (("hint", ""), ("turn", "r1"), ("turn", "r2")):
        kept.note(S, Decision(what, 1.0, "node-0", request_id=request_id))
    assert kept.timed(S, "r1", {Phase.QUEUE: 1.0}, {Phase.DECODE: 2.0})
    assert (
        not kept.timed(S, "r3", {}, {}) and not kept.timed(S, "", {}, {}) and not kept.timed(session(7), "r1", {}, {})
    )
    assert [d.until_first_s for d in kept.of(S)] == [{}, {Phase.QUEUE: 1.0}, {}]
    assert kept.of(S)[1].after_s == {Phase.DECODE: 2.0} and len(kept) == 3
    kept.validate()
