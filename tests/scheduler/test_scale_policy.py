"""How many nodes the policy wants, and when it changes its mind."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.core.scale_policy import (
    EMPTY,
    HBM,
    KV,
    LIMIT,
    SLO,
    STEADY,
    UNKNOWN,
    WINDOW,
    WORK,
    Policy,
    Recommendation,
    Recommender,
    policy_of,
)
from scheduler.core.scale_signals import Signals

POLICY = Policy(min_nodes=1, max_nodes=20, target_utilisation=0.5, down_window_s=300.0, down_step_s=60.0)


def fleet(nodes: int, load: float, **more: object) -> Signals:
    """A fleet of one device a node, on which `load` devices' worth of work arrives."""
    return replace(Signals(nodes=nodes, devices=nodes, arriving=load), **more)  # type: ignore[arg-type]


def look(recommender: Recommender, seen: Signals, now: float = 0.0) -> Recommendation:
    said = recommender.look(seen, now)
    assert said is not None
    return said


def follow(policy: Policy, loads: list[float], every_s: float = 15.0, nodes: int = 2) -> list[int]:
    """Recommendations for a fleet that has at once what is recommended."""
    recommender, sizes = Recommender(policy), []
    for n, load in enumerate(loads):
        nodes = look(recommender, fleet(nodes, load), n * every_s).nodes
        sizes.append(nodes)
    return sizes


def test_the_fleet_gets_the_nodes_that_its_work_needs_at_the_target() -> None:
    said = look(Recommender(POLICY), fleet(2, 3.0))
    assert (said.nodes, said.wanted, said.why, said.utilisation) == (6, 6, WORK, 1.5)


def test_outstanding_work_wants_to_be_done_within_its_time() -> None:
    assert look(Recommender(POLICY), fleet(2, 1.0, work_s=60.0)).nodes == 6


def test_memory_counts_where_it_is_scarcer_than_compute() -> None:
    said = look(Recommender(POLICY), fleet(2, 0.1, hbm=1.9))
    assert (said.nodes, said.why) == (4, HBM)


def test_nodes_with_several_devices_are_counted_as_nodes() -> None:
    said = look(Recommender(POLICY), Signals(nodes=1, devices=4, devices_a_node=4, arriving=3.0))
    assert said.nodes == 2 and said.utilisation == 0.75


@pytest.mark.parametrize("load", [0.91, 1.0, 1.09])
def test_near_the_target_nothing_changes(load: float) -> None:
    said = look(Recommender(POLICY), fleet(2, load))
    assert (said.nodes, said.why) == (2, STEADY)


def test_a_load_that_swings_does_not_make_the_fleet_swing() -> None:
    sizes = follow(POLICY, [1.0, 3.0] * 40)
    assert set(sizes[1:]) == {6}


def test_a_load_that_is_gone_takes_nodes_away_after_the_window_and_by_steps() -> None:
    sizes = follow(POLICY, [5.0] * 4 + [0.5] * 80, nodes=10)
    gone = 4 * 15.0
    at_s = [15.0 * n for n in range(1, len(sizes)) if sizes[n] < sizes[n - 1]]
    assert at_s[0] >= gone + 300.0 - 15.0 and sizes[-1] == 1
    assert all(later - before >= 60.0 for before, later in pairwise(at_s))
    assert all(after >= before - max(before // 4, 1) for before, after in pairwise(sizes))


def test_a_step_up_can_have_to_wait_for_its_window_too() -> None:
    sizes = follow(replace(POLICY, up_window_s=60.0), [1.0] * 4 + [5.0] * 8)
    assert sizes.index(10) == 7, "the last low demand is 60 s old"


def test_nodes_that_have_not_come_yet_are_not_ordered_again() -> None:
    recommender = Recommender(POLICY)
    said = [look(recommender, fleet(2, 3.0), 15.0 * n) for n in range(20)]
    assert {each.nodes for each in said} == {6}


def test_limits_hold_and_are_named() -> None:
    assert look(Recommender(POLICY), fleet(2, 100.0)).why == LIMIT
    assert look(Recommender(replace(POLICY, min_nodes=3)), fleet(3, 0.0)).nodes == 3
    assert look(Recommender(replace(POLICY, max_nodes=4)), fleet(9, 9.0)).nodes == 4


def test_a_fleet_that_is_not_known_is_recommended_nothing() -> None:
    recommender = Recommender(POLICY)
    assert recommender.look(Signals(), 0.0) is None
    assert recommender.look(fleet(4, 0.1, incomplete="the scheduler has just started"), 60.0) is None
    assert look(recommender, fleet(4, 0.1), 120.0).nodes == 4, "what is there stays for a window"
    assert look(recommender, fleet(4, 0.1), 430.0).nodes == 3


def test_a_fleet_whose_nodes_all_died_should_have_its_size() -> None:
    recommender = Recommender(POLICY)
    look(recommender, fleet(2, 3.0))
    said = look(recommender, Signals(), 15.0)
    assert (said.nodes, said.why, said.utilisation) == (6, EMPTY, None)


def test_signals_that_are_incomplete_change_nothing() -> None:
    recommender = Recommender(POLICY)
    look(recommender, fleet(6, 3.0))
    for n, load in enumerate((3.0, 0.0, 9.0), 1):
        said = look(recommender, fleet(6, load, incomplete="no report from node-0"), 600.0 * n)
        assert (said.nodes, said.why) == (6, UNKNOWN)


def test_the_fleet_does_not_shrink_below_the_dram_that_sessions_need() -> None:
    held = {"resumable_bytes": 290.0, "dram_bytes": 600.0}  # 100 a node: three are 0.97 full, four 0.73
    recommender = Recommender(replace(POLICY, down_window_s=0.0, down_step_s=0.0, down_share=1.0))
    look(recommender, fleet(6, 3.0, **held))
    said = look(recommender, fleet(6, 0.1, **held), 15.0)
    assert (said.nodes, said.why) == (4, KV)
    more = look(Recommender(POLICY), fleet(2, 0.5, resumable_bytes=900.0, dram_bytes=200.0))
    assert more.nodes == 2, "what SSD and blob can hold orders no node"


def test_a_missed_slo_adds_a_node_at_a_time_and_only_where_that_helps() -> None:
    missed = {"attainment": 0.5, "turns": 100}
    recommender = Recommender(POLICY)
    assert look(recommender, fleet(4, 1.6, **missed)).nodes == 5
    assert look(recommender, fleet(4, 1.6, **missed), 200.0).nodes == 5, "the fifth has not come"
    assert look(recommender, fleet(5, 1.6, **missed), 210.0).nodes == 6
    assert look(recommender, fleet(6, 1.6, **missed), 220.0).nodes == 6, "it is too soon"
    said = look(Recommender(POLICY), fleet(4, 0.4, **missed))
    assert (said.nodes, said.why) == (4, SLO), "an idle fleet is not helped, nor made smaller"
    few = Recommender(replace(POLICY, down_window_s=0.0))
    look(few, fleet(4, 1.9))
    assert look(few, fleet(4, 0.4, attainment=0.0, turns=19), 15.0).nodes == 3, "so few answers say nothing"


def test_while_a_smaller_fleet_waits_for_its_window_that_is_said() -> None:
    recommender = Recommender(POLICY)
    look(recommender, fleet(6, 3.0))
    assert look(recommender, fleet(6, 0.5), 15.0).why == WINDOW


def test_a_fleet_without_nodes_is_no_policy() -> None:
    with pytest.raises(ValueError, match="without a node nothing is answered"):
        Policy(min_nodes=0, max_nodes=3)
    with pytest.raises(ValueError, match="at most max_nodes 2"):
        Policy(min_nodes=3, max_nodes=2)


def test_the_configuration_is_the_policy() -> None:
    from runtime.autoscale_config import AutoscaleSection

    made = policy_of(AutoscaleSection(target_utilisation=0.7).model_dump(), 8)
    assert made == Policy(max_nodes=8, target_utilisation=0.7)
    assert policy_of(AutoscaleSection(min_nodes=3).model_dump(), 2).max_nodes == 3


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 12), st.floats(0, 50), st.floats(0, 500), st.floats(0, 1), st.floats(0, 2), st.booleans()
        ),
        min_size=1,
        max_size=40,
    )
)
def test_whatever_is_seen_the_answer_is_within_the_limits_and_steps(
    seen: list[tuple[int, float, float, float, float, bool]],
) -> None:
    policy = Policy(min_nodes=2, max_nodes=9)
    recommender, before = Recommender(policy), 0
    for n, (nodes, arriving, work_s, share, dram, stale) in enumerate(seen):
        signals = Signals(
            nodes=nodes,
            devices=nodes,
            arriving=arriving,
            work_s=work_s,
            hbm=nodes * share,
            attainment=share,
            turns=50,
            resumable_bytes=dram * nodes,
            dram_bytes=float(nodes),
            incomplete="stale" if stale else "",
        )
        said = recommender.look(signals, 10.0 * n)
        if said is None:
            assert not before
            continue
        assert 2 <= said.nodes <= 9 and 2 <= said.wanted <= 9
        if before:
            assert said.nodes >= before - max(before // 4, 1)
            assert not stale or said.nodes == before
        before = said.nodes
