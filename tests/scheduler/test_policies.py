"""What every policy guarantees, over random fleets; and how `balanced` compares with `sticky`."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.devices import device_name
from contracts.errors import NotFound
from contracts.ids import SessionKey
from contracts.kv import KvShape
from scheduler.core import snapshot, terms
from scheduler.core.advisories import Hint
from scheduler.core.columns import CLASSES
from scheduler.core.control import Ask, Control
from scheduler.core.directory import Held
from scheduler.core.filters import eligible
from scheduler.core.fleet import LoadReport, Model, Rates
from scheduler.core.placement import EXPLAINED, place
from scheduler.core.policies import POLICIES, spread
from scheduler.core.snapshot import PlacementRequest, Snapshot
from tests.scheduler.test_core import MODEL, TOKEN_BYTES, Harness

S = SessionKey("t", "s")
BY_WORK = ("balanced", "sticky", "cache-aware")


def fleet(seed: int, nodes: int, devices: int = 1, *, level: bool = False) -> Snapshot:
    """A random fleet and a session of 960 tokens of which some nodes hold a part. level: all have the same work, memory
    and rates. devices: of each node."""
    drawn, h = random.Random(seed), Control()
    h.fleet.request_s = drawn.choice((0.05, 1.0, 4.0))
    even = (drawn.random(), drawn.randrange(1000))
    for i in range(nodes):
        name = f"node-{i}"
        rates = (
            Rates() if level else Rates(drawn.choice((1e7, 1e9)), drawn.choice((1e8, 2e9)), drawn.choice((1e6, 3e8)))
        )
        for device in (device_name(name, number, devices) for number in range(devices)):
            h.fleet.worker_joined(device, "w", (MODEL,), 0.0, rates)
            work, free = even if level else (drawn.choice((0.0, drawn.expovariate(1.0))), drawn.randrange(1000))
            load = LoadReport(by_priority={0: work, 3: work}, hbm_pages_total=1000, hbm_pages_free=free)
            load = replace(load, prefill_token_s=0.0 if level else drawn.choice((0.0, 1e-3)))
            h.fleet.loaded(device, load, [], [], 0.0)
            if not level and drawn.random() < 0.1:
                h.fleet.drain(device)
        h.fleet.store_joined(name, "s")
        if drawn.random() < 0.5:
            tokens = 64 * drawn.randint(1, 15)
            dram = tokens if level else drawn.randint(0, tokens)
            h.directory.report(name, S, "m", 960, 1.0, Held(tokens, tokens * TOKEN_BYTES, dram))
    return snapshot.take(h.fleet, h.directory.get(S), "m", 0.0, drawn.randrange(100))


def choose(view: Snapshot, turn: PlacementRequest, policy: str, seed: int = 5) -> str:
    return place(view, turn, POLICIES[policy], seed).node


fleets = st.builds(fleet, st.integers(0, 1 << 30), st.integers(1, 12), st.integers(1, 3)).filter(
    lambda view: bool(view.serving.any())
)
level_fleets = st.builds(fleet, st.integers(0, 1 << 30), st.integers(2, 12), st.integers(1, 3), level=st.just(True))
turns = st.builds(
    PlacementRequest, st.just("m"), advised=st.booleans(), lead_s=st.floats(0, 2), urgency=st.integers(0, CLASSES - 1)
)


def busier(view: Snapshot, row: int, urgency: int, seconds: float) -> Snapshot:
    """So much more work of one class on one node."""
    work, expected = (np.zeros((CLASSES, len(view.names))) for _ in range(2))
    work[list(view.classes)], expected[list(view.classes)] = view.work_s, view.expected
    work[urgency, row] += seconds
    return replace(view, classes=tuple(range(CLASSES)), work_s=work, expected=expected)


@given(st.integers(0, 3), st.lists(st.integers(0, 9), min_size=1, max_size=60), st.integers(0, (1 << 64) - 1))
def test_the_best_five_are_explained_whatever_order_the_nodes_have(unknown: int, costs: list[int], seed: int) -> None:
    view, turn = fleet(7, len(costs), level=True), PlacementRequest("m")
    costs_s = np.array(costs, np.float64)
    costs_s[:unknown] = np.inf
    chosen = place(
        view, turn, lambda view, turn, rows, seed: {"cost_s": np.where(np.isinf(costs_s), np.nan, costs_s)[rows]}, seed
    )
    drawn = spread(view, np.arange(len(costs)), seed)
    order = sorted(range(len(costs)), key=lambda row: (costs_s[row], int(drawn[row])))
    assert chosen.nodes == tuple(view.names[row] for row in order[:EXPLAINED])


@given(fleets, turns, st.sampled_from(sorted(POLICIES)), st.integers(0, (1 << 64) - 1))
@settings(max_examples=150, deadline=None)
def test_a_decision_depends_on_snapshot_turn_and_seed_and_changes_nothing(
    view: Snapshot, turn: PlacementRequest, policy: str, seed: int
) -> None:
    before = [np.copy(getattr(view, name)) for name in ("work_s", "expected", "kv_free_bytes", "serving", "hashes")]
    first, second = (place(view, turn, POLICIES[policy], seed) for _ in range(2))
    assert first == second and first.node == next(iter(first.scores))[0]
    totals = [sum(scores.values()) for _, scores in first.scores]
    assert totals == sorted(totals) or max(totals) - min(totals) < 1e-6, "the best nodes come best first"
    for old, name in zip(before, ("work_s", "expected", "kv_free_bytes", "serving", "hashes"), strict=True):
        assert (old == getattr(view, name)).all()


@given(fleets, turns, st.sampled_from(BY_WORK), st.data())
@settings(max_examples=200, deadline=None)
def test_a_node_is_not_chosen_for_having_more_to_do(
    view: Snapshot, turn: PlacementRequest, policy: str, data: st.DataObject
) -> None:
    chosen = choose(view, turn, policy)
    row = data.draw(st.integers(0, len(view.names) - 1))
    after = choose(
        busier(view, row, data.draw(st.integers(0, CLASSES - 1)), data.draw(st.floats(0.001, 10))), turn, policy
    )
    assert view.names[row] == chosen or after != view.names[row]


@given(fleets, turns, st.data())
@settings(max_examples=100, deadline=None)
def test_more_to_do_never_makes_the_chosen_node_more_attractive(
    view: Snapshot, turn: PlacementRequest, data: st.DataObject
) -> None:
    chosen = place(view, turn, POLICIES["balanced"], 5)
    row = view.row(chosen.node)
    assert row is not None
    view = busier(view, row, data.draw(st.integers(0, CLASSES - 1)), data.draw(st.floats(0.001, 10)))
    after = place(view, turn, POLICIES["balanced"], 5)
    again = dict(after.scores).get(chosen.node)
    assert again is None or sum(again.values()) > sum(dict(chosen.scores)[chosen.node].values())


@given(fleets, turns, st.sampled_from(sorted(POLICIES)), st.data())
@settings(max_examples=200, deadline=None)
def test_pins_avoided_and_suspect_nodes_are_honoured(
    view: Snapshot, turn: PlacementRequest, policy: str, data: st.DataObject
) -> None:
    serving = [name for name, serves in zip(view.names, view.serving, strict=True) if serves]
    pin = data.draw(st.sampled_from(serving))
    assert choose(view, replace(turn, pin=pin, avoid=frozenset({pin})), policy) == pin
    avoid = data.draw(st.sets(st.sampled_from(view.names)))
    suspect = data.draw(st.sets(st.sampled_from(view.names)))
    doubtful = replace(view, suspect=np.array([name in suspect for name in view.names]))
    chosen = choose(doubtful, replace(turn, avoid=frozenset(avoid)), policy)
    assert chosen in serving
    for wanted in (set(serving) - avoid - suspect, set(serving) - avoid):
        if wanted:
            assert chosen in wanted
            break


# ---- priorities (SYMPHONY, section 3.6)


@given(st.lists(st.integers(0, 30), min_size=2, max_size=8), st.integers(1, 40), st.booleans())
@settings(max_examples=80, deadline=None)
def test_urgent_sessions_are_spread_evenly_whatever_less_urgent_work_is_where(
    low: list[int], urgent: int, hinted: bool
) -> None:
    h = Harness(len(low))
    h.fleet.request_s = 1.0
    for i, requests in enumerate(low):
        h.fleet.loaded(f"node-{i}", LoadReport(by_priority={5: 0.01 * requests}), [], [], 0.0)
        for n in range(requests):
            h.advise(Hint(SessionKey("t", f"low-{i}-{n}"), f"low-{i}-{n}", "m", None, 60.0, 5, f"node-{i}"), 0.0)
    counts = [0] * len(low)
    for n in range(urgent):
        session = SessionKey("t", f"u{n}")
        if hinted:
            h.advise(Hint(session, f"u{n}", "m", None, 60.0, -1), 0.0)
        pending = h.advisories.get(session)
        node = pending.node if pending is not None else h.place(Ask(f"u{n}", session, "m", -1), 0.0).node
        counts[int(node.removeprefix("node-"))] += 1
    # A tenth of at most 30 less urgent requests counts: as much as three urgent ones, and their share of what hints
    # announce.
    assert max(counts) - min(counts) <= 1 + 0.1 * (max(low) - min(low)) * 1.01 / 0.9 + 1e-9


# ---- without a hint


@given(fleets, st.integers(0, CLASSES - 1))
@settings(max_examples=300, deadline=None)
def test_without_a_hint_a_turn_is_never_estimated_to_be_worse_off_than_where_sticky_sends_it(
    view: Snapshot, urgency: int
) -> None:
    turn = PlacementRequest("m", urgency=urgency)
    rows = eligible(view, turn)  # what a node costs is reckoned among those that may have the turn
    cost = dict(zip(rows.tolist(), sum(POLICIES["balanced"](view, turn, rows, 5).values()), strict=True))
    ours, sticky = (view.row(choose(view, turn, policy)) for policy in ("balanced", "sticky"))
    assert cost[ours] <= cost[sticky] + 1e-8


@given(level_fleets)
@settings(max_examples=200, deadline=None)
def test_without_a_hint_and_with_equal_loads_a_turn_goes_where_sticky_sends_it(view: Snapshot) -> None:
    rows = np.arange(len(view.names))
    held = {
        row: holder.tokens for holder in view.cached.holders for row in np.atleast_1d(rows[holder.place.rows]).tolist()
    }
    ours, sticky = (view.row(choose(view, PlacementRequest("m"), policy)) for policy in ("balanced", "sticky"))
    assert held.get(ours, 0) == held.get(sticky, 0) == max(held.values(), default=0), "one of those that hold most"


# ---- each policy


def test_sticky_goes_to_whoever_holds_most_and_else_to_the_idlest() -> None:
    h = Harness(3)
    h.fleet.loaded("node-0", LoadReport(outstanding_s=50.0), [], [], 0.0)
    h.fleet.loaded("node-1", LoadReport(outstanding_s=1.0), [], [], 0.0)
    assert h.choose(policy="sticky").node == "node-2"
    h.hold("node-1", 64)
    assert h.choose(policy="sticky").node == "node-1"
    h.hold("node-0", 128)
    assert h.choose(policy="sticky").node == "node-0"


def test_cache_aware_leaves_the_cache_behind_only_when_the_fleet_is_out_of_balance() -> None:
    h = Harness()
    h.hold("node-0", 960)
    for work_s, node in ((3.9, "node-0"), (4.1, "node-1")):
        h.fleet.loaded("node-0", LoadReport(outstanding_s=work_s), [], [], 0.0)
        assert h.choose(policy="cache-aware").node == node


def test_round_robin_takes_turns_and_random_takes_all() -> None:
    view = fleet(3, 4, level=True)
    taken = [choose(replace(view, decisions=i), PlacementRequest("m"), "round-robin") for i in range(8)]
    assert sorted(taken[:4]) == sorted(view.names) and taken[:4] == taken[4:]
    drawn = [choose(replace(view, decisions=i), PlacementRequest("m"), "random") for i in range(400)]
    assert min(drawn.count(name) for name in view.names) > 50


def test_a_policy_that_does_not_know_a_node_leaves_it_for_last() -> None:
    view = fleet(3, 3, level=True)

    def partly(view: Snapshot, turn: PlacementRequest, rows: snapshot.Rows, seed: int) -> dict[str, terms.Floats]:
        return {"guess": np.where(rows == 1, 2.0, np.nan)}

    assert place(view, PlacementRequest("m"), partly, 5).node == "node-1"


def test_a_pin_to_a_node_that_does_not_serve_the_model_is_refused() -> None:
    h = Harness(1)
    h.fleet.worker_joined(
        "node-9", "w9", (Model("other", KvShape.of_heads(b"o" * 32, 1, 1, 8, 64, "float32"), 1, 0),), 0.0
    )
    h.fleet.store_joined("node-9", "s9")
    with pytest.raises(NotFound, match="node-9 does not serve the model 'm'"):
        h.choose(PlacementRequest("m", pin="node-9"))
    assert h.choose(PlacementRequest("other", pin="node-9")).node == "node-9"
