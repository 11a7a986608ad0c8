"""Placement, the fleet's bookkeeping, the directory and the hints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.errors import InvalidRequest, NotFound, Unavailable
from contracts.ids import SessionKey
from contracts.kv import KvShape
from contracts.placement import LEAVES_CACHE_REQUESTS
from scheduler.core import snapshot
from scheduler.core.advisories import Advisories, Hint, Pending
from scheduler.core.control import Ask, Control, Prefetch, seed_of
from scheduler.core.directory import Held
from scheduler.core.fleet import DEAD_AFTER_S, LoadReport, Model, Rates
from scheduler.core.placement import Choice, place
from scheduler.core.placer import UNREPORTED_S
from scheduler.core.policies import POLICIES
from scheduler.core.snapshot import PlacementRequest

#: 960 tokens are 94 MB: 0.1 s on a usual link.
MODEL = Model("m", KvShape.of_heads(b"f" * 32, 24, 8, 64, 64, "float32"), 1000, 0)
TOKEN_BYTES = MODEL.shape.chunk_bytes // MODEL.shape.chunk_tokens
S = SessionKey("t", "s")


def hint(session: SessionKey = S, advisory_id: str = "a1", **more: Any) -> Hint:
    return Hint(session, advisory_id, **{"model": "m", "expires_s": 60.0, **more})


class Harness(Control):
    """A fleet of serving nodes with a directory and hints, at time 0."""

    def __init__(self, nodes: int = 2) -> None:
        super().__init__()
        for i in range(nodes):
            self.fleet.worker_joined(f"node-{i}", f"w{i}", (MODEL,), 0.0)
            self.fleet.store_joined(f"node-{i}", f"s{i}")

    def hold(self, node: str, tokens: int, key: SessionKey = S) -> None:
        self.directory.report(node, key, "m", 960, 1.0, Held(tokens, tokens * TOKEN_BYTES, tokens))

    def choose(
        self, turn: PlacementRequest | None = None, policy: str = "balanced", key: SessionKey = S, now: float = 0.0
    ) -> Choice:
        turn = turn or PlacementRequest("m")
        view = snapshot.take(self.fleet, self.directory.get(key), turn.model, now)
        return place(view, turn, POLICIES[policy], seed_of(key))


def test_the_node_with_fewest_outstanding_requests_is_chosen_once_that_is_worth_leaving_the_cache() -> None:
    h = Harness()
    h.hold("node-0", 960)
    h.fleet.request_s = 10.0
    for n in range(LEAVES_CACHE_REQUESTS):
        h.fleet.placed("node-0", f"r{n}", 0.0)
        assert h.choose(PlacementRequest("m", advised=True)).node == "node-0", "it is not worth leaving the cache for"
    h.fleet.placed("node-0", "one-more", 0.0)
    assert h.choose(PlacementRequest("m", advised=True)).node == "node-1"
    assert h.choose(policy="sticky").node == "node-0"


def test_with_equal_load_the_cache_decides() -> None:
    for holder in ("node-0", "node-1"):
        h = Harness()
        h.hold(holder, 960)
        assert h.choose(PlacementRequest("m", advised=True)).node == holder
        assert h.choose().node == holder


def test_a_link_that_was_measured_counts_as_fast_as_it_is() -> None:
    h = Harness()
    h.hold("node-0", 960)  # 0.1 s at a link's usual rate
    h.fleet.request_s = 0.1
    for n in range(20):
        h.fleet.placed("node-0", f"r{n}", 0.0)
    assert h.choose().node == "node-0"
    h.fleet.worker_joined("node-1", "w1", (MODEL,), 0.0, Rates(link_bytes_per_s=8e9))
    assert h.choose().node == "node-1"
    h.fleet.worker_joined("node-1", "w1", (MODEL,), 0.0)
    assert h.choose().node == "node-0", "a new process that did not measure counts as usual again"


def test_without_a_hint_a_short_queue_is_worth_less_than_a_long_load() -> None:
    h = Harness()
    h.fleet.request_s = 0.05
    h.hold("node-0", 960)  # 0.1 s on the link
    for n in range(6):
        h.fleet.placed("node-0", f"r{n}", 0.0)
    assert h.choose().node == "node-0"
    h.fleet.request_s = 1.0
    for n in range(20):
        h.fleet.placed("node-0", f"r{n}", 0.0)
    assert h.choose().node == "node-1"


def test_hints_whose_request_has_not_come_count_as_work_to_come() -> None:
    h = Harness()
    other = SessionKey("t", "other")
    h.advisories.place(Pending(hint(other), "node-0", 0.0))
    assert h.choose(PlacementRequest("m", advised=True)).node == "node-1"


def test_new_sessions_spread_over_idle_nodes() -> None:
    h = Harness(4)
    counts = {f"node-{i}": 0 for i in range(4)}
    for i in range(400):
        counts[h.choose(key=SessionKey("t", f"s{i}")).node] += 1
    assert min(counts.values()) > 50


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.integers(0, (1 << 64) - 1))
@settings(max_examples=50, deadline=None)
def test_a_decision_is_a_pure_function_and_nobody_with_less_work_is_passed_over(work: list[int], seed: int) -> None:
    h = Harness(len(work))
    for i, n in enumerate(work):
        for j in range(n):
            h.fleet.placed(f"node-{i}", f"r{i}.{j}", 0.0)
    view = snapshot.take(h.fleet, None, "m", 0.0)
    first, second = (place(view, PlacementRequest("m"), POLICIES["balanced"], seed) for _ in range(2))
    assert first == second
    assert work[int(first.node.removeprefix("node-"))] == min(work)


def test_nodes_that_failed_this_request_are_avoided_while_others_serve() -> None:
    h = Harness()
    assert h.choose(PlacementRequest("m", avoid=frozenset({"node-0"}))).node == "node-1"
    assert h.choose(PlacementRequest("m", avoid=frozenset({"node-0", "node-1"}))).node in ("node-0", "node-1")


def test_a_silent_node_gets_nothing_while_another_serves() -> None:
    h = Harness()
    h.fleet.loaded("node-1", LoadReport(), [], [], now=100.0)
    assert h.choose(now=101.0).node == "node-1"


def test_refusals_name_what_is_wrong() -> None:
    h = Harness()
    with pytest.raises(InvalidRequest, match="node-0, node-1") as wrong_pin:
        h.choose(PlacementRequest("m", pin="node-9"))
    assert wrong_pin.value.param == "X-Upbeat-Node"
    with pytest.raises(NotFound) as wrong_model:
        h.choose(PlacementRequest("nope"))
    assert wrong_model.value.param == "model" and wrong_model.value.code == "model_not_found"
    h.fleet.worker_left("node-0")
    with pytest.raises(Unavailable):
        h.choose(PlacementRequest("m", pin="node-0"))
    h.fleet.store_left("node-1")
    with pytest.raises(Unavailable):
        h.choose()


def test_a_choice_explains_itself() -> None:
    h = Harness()
    h.fleet.placed("node-0", "r1", 0.0)
    why = h.choose().why
    assert why.startswith("node-1 work_s=0 ") and "node-0 work_s=1" in why


def test_a_worker_report_is_the_truth_about_what_it_has_heard_of() -> None:
    h = Harness()
    node = h.fleet.devices["node-0"]
    h.fleet.placed("node-0", "r1", 0.0)
    h.fleet.loaded("node-0", LoadReport(), in_flight=[], finished=[], now=1.0)
    assert "r1" in node.outstanding and h.fleet.devices["node-0"].work_s == h.fleet.request_s, (
        "it may still be on its way to the worker"
    )
    h.fleet.loaded("node-0", LoadReport(outstanding_s=7.5, request_s=3.0), in_flight=["r1"], finished=[], now=2.0)
    assert h.fleet.devices["node-0"].work_s == 7.5 and h.fleet.request_s > 1.0
    h.fleet.loaded("node-0", LoadReport(), in_flight=[], finished=["r1"], now=3.0)
    assert not node.outstanding and h.fleet.devices["node-0"].work_s == 0.0


def test_a_turn_follows_its_hint_unless_that_node_has_become_the_worse_choice() -> None:
    h = Harness()
    h.hold("node-0", 960)  # 0.1 s on the link
    assert h.choose(PlacementRequest("m", prefetched="node-1")).node in ("node-0", "node-1")
    h.fleet.loaded("node-0", LoadReport(outstanding_s=0.05), [], [], 0.0)
    assert h.choose(PlacementRequest("m", prefetched="node-1")).node == "node-1"
    h.fleet.loaded("node-1", LoadReport(outstanding_s=0.12), [], [], 0.0)
    assert h.choose(PlacementRequest("m", prefetched="node-1")).node == "node-0"


def test_a_first_turn_goes_where_there_is_least_work_when_it_comes_whatever_the_hint_said() -> None:
    h = Harness()
    h.fleet.loaded("node-1", LoadReport(outstanding_s=0.5), [], [], 0.0)
    assert h.choose(PlacementRequest("m", prefetched="node-1")).node == "node-0"


def test_a_restarted_worker_has_nothing_outstanding() -> None:
    h = Harness()
    h.fleet.placed("node-0", "r1", 0.0)
    h.fleet.worker_joined("node-0", "w0", (MODEL,), 1.0)
    assert not h.fleet.devices["node-0"].outstanding


def test_sources_are_holders_with_the_longest_prefix_first() -> None:
    h = Harness(3)
    h.hold("node-0", 100)
    h.hold("node-1", 500)
    h.hold("node-2", 500)
    session = h.directory.get(S)
    assert session is not None and session.sources() == ["node-1", "node-2", "node-0"]
    assert session.sources(without="node-1") == ["node-2", "node-0"]
    h.directory.forget_node("node-2")
    assert session.sources() == ["node-1", "node-0"]


def test_the_node_that_runs_the_last_turn_is_a_source_before_it_has_reported_anything() -> None:
    h = Harness()
    h.hold("node-0", 100)
    h.place(Ask("r1", S, "m", pin="node-1"), 0.0)
    [sent] = [c for c in h.advise(hint(pin="node-0"), 0.1) if isinstance(c, Prefetch)]
    assert sent.node == "node-0" and sent.sources == ("node-1",)
    h.fleet.loaded("node-1", LoadReport(), [], ["r1"], 0.2, 1)
    h.withdraw(S, S.tenant, "")
    [sent] = [c for c in h.advise(hint(pin="node-0"), 0.3) if isinstance(c, Prefetch)]
    assert sent.sources == ("node-1",), "it has ended, and left a cache"
    h.directory.report("node-1", S, "m", 200, 2.0, Held(0, 0))
    assert h.place(Ask("r2", S, "m", pin="node-0"), 0.4).sources == (), "reports say what is there"


def test_a_hint_during_a_turn_or_just_after_it_stays_with_the_cache_that_nobody_has_reported() -> None:
    h = Harness(4)
    node = h.place(Ask("r1", S, "m"), 0.0).node
    others = [name for name in h.fleet.devices if name != node]

    def hinted(advisory_id: str, now: float) -> str:
        h.withdraw(S, S.tenant, "")
        [sent] = [c for c in h.advise(hint(advisory_id=advisory_id), now) if isinstance(c, Prefetch)]
        return sent.node

    assert hinted("during", 0.1) == node, "its own turn is work on that node"
    h.fleet.loaded(node, LoadReport(), [], ["r1"], 0.2, 1)
    h.fleet.placed(node, "another", 0.2)
    assert hinted("after", 0.3) == node
    assert h.place(Ask("r2", S, "m", pin=others[0]), 0.3).sources == (node,)
    assert hinted("moved", 0.4) == others[0], "the last turn left all of it there"
    h.hold(others[1], 960)
    h.fleet.placed(others[1], "more", 0.4)
    assert hinted("reported", 0.5) == others[1]
    h.directory.report(others[1], S, "m", 960, 1.0, Held(0, 0))
    h.place(Ask("r3", S, "m", pin=node), 0.6)
    h.fleet.loaded(node, LoadReport(), [], ["r3", "another"], 0.7, 2)
    h.fleet.placed(node, "another", 0.8 + UNREPORTED_S)
    assert hinted("late", 0.8 + UNREPORTED_S) != node, "the turn must have failed"


@pytest.mark.parametrize("lost", ["its store", "the machine"])
def test_a_lost_node_is_no_source_of_the_turn_that_it_ran(lost: str) -> None:
    h = Harness()
    h.place(Ask("r1", S, "m", pin="node-1"), 0.0)
    if lost == "its store":
        h.store_left("node-1")
        now = 0.1
    else:
        now = DEAD_AFTER_S + 1.0
        h.fleet.loaded("node-0", LoadReport(), [], [], now, 1)
        h.tick(now)
    [sent] = [c for c in h.advise(hint(), now) if isinstance(c, Prefetch)]
    assert sent.node == "node-0" and sent.sources == ()
    assert h.place(Ask("r1", S, "m", avoid=frozenset(["node-1"])), now).sources == ()


def test_a_hint_for_another_model_than_the_last_turns_goes_anywhere() -> None:
    h = Harness()
    for i in range(2):
        h.fleet.worker_joined(f"node-{i}", f"w{i}", (MODEL, replace(MODEL, name="other")), 0.0)
    h.place(Ask("r1", S, "other", pin="node-0"), 0.0)
    [sent] = [c for c in h.advise(hint(), 0.1) if isinstance(c, Prefetch)]
    assert sent.node == "node-1"


def test_of_thousands_of_hints_that_end_together_a_tick_drops_a_part() -> None:
    h = Harness()
    for i in range(2000):
        h.advise(hint(SessionKey(f"t{i % 4}", f"{i}"), f"a{i}", expires_s=1.0), 0.0)
    assert len(h.advisories) == 2000 and not h.late(0.5)
    h.tick(1.5)
    assert 1000 < len(h.advisories) < 2000 and h.late(1.5)
    while h.late(1.5):
        h.expire(1.5)
    assert not len(h.advisories)


def test_hints_merge_expire_and_are_used_once() -> None:
    a = Advisories()
    a.place(Pending(hint(), "node-0", 0.0))
    a.place(Pending(hint(advisory_id="a2", expires_s=61.0), "node-1", 1.0))
    assert len(a) == 1 and a.on_node("node-0") == 0
    assert a.invalidate(None, "t", "a1") is None
    used = a.use(S)
    assert used is not None and used.node == "node-1" and a.use(S) is None
    a.place(Pending(hint(advisory_id="a3"), "node-0", 0.0))
    assert a.invalidate(None, "other-tenant", "a3") is None, "ids are a tenant's own"
    assert not a.expire(59.9) and len(a.expire(60.0)) == 1
    assert a.outcomes == {"used": 1, "expired": 1}


def test_many_hints_that_end_together_end_in_parts() -> None:
    a = Advisories()
    for i in range(1000):
        a.place(Pending(hint(session=SessionKey("t", f"s{i}"), advisory_id=f"a{i}"), "node-0", 0.0))
    ended = 0
    while a.late(60.0):
        ended += (part := len(a.expire(60.0, 300)))
        assert part <= 300
    assert ended == a.outcomes["expired"] == 1000 and not len(a)
    a.validate()


def test_hints_that_may_not_move_are_not_looked_at() -> None:
    a = Advisories()
    for i, (pin, left) in enumerate([("", ()), ("node-0", ()), ("", ("node-1", "node-2"))]):
        given = hint(session=SessionKey("t", f"s{i}"), advisory_id=f"a{i}", pin=pin)
        a.place(Pending(given, "node-0", 0.0, left=left))
    assert [p.session.session_id for p in a.movable("node-0")] == ["s0"] and a.on_node("node-0") == 3
    a.validate()
    a.use(SessionKey("t", "s0"))
    assert not list(a.movable("node-0"))
    a.validate()
