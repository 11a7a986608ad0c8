"""Call graphs: what is learned of a workflow, and which sessions a request of an agent says will ask next."""

from __future__ import annotations

import json
from collections.abc import Set

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.errors import InvalidRequest
from contracts.ids import SessionKey
from contracts.workflow import Edge, Graph, Hop, default_run, graph_to_json, parse_graph
from scheduler.core import callgraph_table
from scheduler.core.callgraph import CallGraph
from scheduler.core.callgraph_runs import Run
from scheduler.core.callgraph_stored import from_stored, to_stored
from scheduler.core.callgraph_table import IDLE_S, MAX_TENANT_EDGES, MAX_WORKFLOWS, Callgraphs, NextHop
from scheduler.core.control import Ask, Prefetch
from scheduler.core.fleet import LoadReport
from scheduler.core.trust import Trust
from tests.scheduler.test_core import Harness, hint


class Team:
    """Runs of one workflow "w" of tenant "t" over a bare table. A session is RUN:NAME, a request id says both and its
    number."""

    def __init__(self) -> None:
        self.table, self.asked = Callgraphs(), 0

    def ask(
        self, run: str, agent: str, now: float, session: str = "", ended: tuple[str, ...] = ()
    ) -> tuple[str, list[NextHop]]:
        self.asked += 1
        request_id = f"{run}.{session or agent}.{self.asked}"
        key = SessionKey("t", f"{run}:{session or agent}")
        hops, _ = self.table.request(request_id, key, Hop("w", agent, run, ended), now)
        self.table.validate()
        return request_id, hops

    def chain(self, run: str, *agents: str, start: float = 0.0, step: float = 2.0) -> None:
        """One agent after the other, each when the last has ended."""
        last: tuple[str, ...] = ()
        for i, agent in enumerate(agents):
            last = (self.ask(run, agent, start + i * step, ended=last)[0],)
        self.table.finished(last, start + len(agents) * step)

    @property
    def graph(self) -> CallGraph:
        graph = self.table.get("t", "w")
        assert graph is not None
        return graph

    def edge(self, source: str, target: str) -> Edge:
        edge = self.graph.edge(source, target)
        assert edge is not None
        return edge


def named(hops: list[NextHop]) -> list[str]:
    return [h.session.session_id for h in hops]


def test_an_order_and_its_delays_are_learned_and_the_next_run_is_told_of_them() -> None:
    team = Team()
    team.chain("r1", "manager", "architect", "engineer")
    assert team.edge("manager", "architect") == Edge("manager", "architect", 1.0, 1.0, 2.0)
    _, hops = team.ask("r1", "manager", 10.0)
    assert (
        named(hops) == ["r1:architect"] and hops[0].arrival_s == 12.0 and hops[0].chance > 0.9 and not hops[0].borrowed
    )


def test_the_first_time_in_a_run_the_session_of_the_latest_other_run_is_named_and_is_served_once_the_agent_asks() -> (
    None
):
    team = Team()
    for run in ("r1", "r2"):
        team.chain(run, "manager", "architect")
    first, hops = team.ask("r3", "manager", 10.0)
    assert [(h.session.session_id, h.borrowed) for h in hops] == [("r2:architect", True)]
    _, served = team.table.request("x", SessionKey("t", "r3:architect"), Hop("w", "architect", "r3", (first,)), 12.0)
    assert served == [SessionKey("t", "r2:architect")]


def test_a_conditional_gives_each_successor_its_share_and_rare_ones_no_hint() -> None:
    team = Team()
    for i in range(30):
        team.chain(f"r{i}", "qa", "engineer" if i % 3 else "manager", start=100.0 * i)
    team.chain("rare", "qa", "lawyer", start=5000.0)
    assert team.edge("qa", "engineer").probability == pytest.approx(2 / 3, abs=0.06)
    assert team.edge("qa", "manager").probability == pytest.approx(1 / 3, abs=0.06)
    _, hops = team.ask("r", "qa", 6000.0)
    assert [h.agent for h in hops] == ["engineer", "manager"] and team.edge("qa", "lawyer").probability < 0.1


def test_a_fan_out_is_one_edge_with_several_calls_though_its_branches_interleave() -> None:
    team = Team()
    for run in range(3):
        r, t = f"r{run}", 100.0 * run
        architect, _ = team.ask(r, "architect", t)
        first = [team.ask(r, "engineer", t + 2, f"e{i}", (architect,))[0] for i in range(4)]
        reviews = [team.ask(r, "qa", t + 5 + i, f"q{i}", (first[i],))[0] for i in range(4)]
        team.table.finished(reviews, t + 20)
    edge = team.edge("architect", "engineer")
    assert edge.probability == 1.0 and edge.calls == pytest.approx(4.0) and edge.delay_s == pytest.approx(2.0)
    assert team.edge("engineer", "qa").probability == pytest.approx(1.0) and team.edge(
        "engineer", "qa"
    ).calls == pytest.approx(1.0)
    assert team.graph.edge("engineer", "engineer") is None and team.graph.edge("qa", "qa") is None


def test_a_second_round_of_a_fan_out_names_every_session_of_the_run() -> None:
    team = Team()
    architect, _ = team.ask("r", "architect", 0.0)
    team.table.finished([team.ask("r", "engineer", 2.0, f"e{i}", (architect,))[0] for i in range(3)], 5.0)
    _, hops = team.ask("r", "architect", 200.0)
    assert sorted(named(hops)) == ["r:e0", "r:e1", "r:e2"]


def test_a_reviewer_names_the_engineer_it_reviews_and_not_the_last_one() -> None:
    team = Team()
    for run in ("r1", "r2"):
        start = 100.0 if run == "r2" else 0.0
        engineers = [team.ask(run, "engineer", start, f"e{i}")[0] for i in range(3)]
        hops: list[NextHop] = []
        for i in range(3):
            review, hops = team.ask(run, "qa", start + 5 + i, f"q{i}", (engineers[i],))
            if run == "r2":
                assert named(hops) == [f"r2:e{i}"]
            again, hops = team.ask(run, "engineer", start + 5.5 + i, f"e{i}", (review,))
            if run == "r2":
                assert named(hops) == [f"r2:q{i}"], "and the engineer its reviewer"
            team.table.finished([again], start + 5.9 + i)


def test_an_agent_that_follows_itself_names_its_own_session() -> None:
    team = Team()
    team.chain("r1", *["engineer"] * 5)
    _, hops = team.ask("r1", "engineer", 100.0)
    assert named(hops) == ["r1:engineer"]


def test_sessions_that_run_at_the_moment_are_not_named() -> None:
    team = Team()
    team.chain("r1", "engineer", "qa", "engineer")
    team.ask("r1", "qa", 20.0)
    assert "r1:qa" not in named(team.ask("r1", "engineer", 21.0, "other")[1])


def test_a_session_that_is_named_in_vain_is_believed_less() -> None:
    team = Team()
    for i in range(12):
        engineer, hops = team.ask("r", "engineer", 10.0 * i, f"e{i}")
        review, _ = team.ask("r", "qa", 10.0 * i + 3, f"q{i}", (engineer,))
        team.table.finished([review], 10.0 * i + 5)
    assert all(h.chance < 0.3 for h in hops), "each file has a reviewer of its own: the last one is no guess"


def test_what_changed_is_believed_after_a_while() -> None:
    team = Team()
    for i in range(100):
        team.chain(f"a{i}", "qa", "engineer", start=10.0 * i)
    for i in range(100):
        team.chain(f"b{i}", "qa", "manager", start=2000 + 10.0 * i)
    assert team.edge("qa", "manager").probability > 0.8 > 0.2 > team.edge("qa", "engineer").probability
    assert sum(team.edge("qa", t).probability for t in ("manager", "engineer")) == pytest.approx(1.0, abs=0.05)


def test_a_declared_graph_counts_at_once_and_what_is_observed_moves_it() -> None:
    team = Team()
    edges = (Edge("manager", "architect", 1.0, 1.0, 6.0), Edge("architect", "engineer", 0.5, 4.0, 1.0))
    team.table.declare("t", "w", Graph(("manager", "architect", "engineer"), edges))
    assert team.graph.next("architect") == [edges[1]]
    for i in range(40):
        team.chain(f"r{i}", "manager", "architect", start=100.0 * i)
    moved = team.edge("manager", "architect")
    assert moved.probability == pytest.approx(1.0) and 2.0 < moved.delay_s < 3.0
    assert team.edge("architect", "engineer").probability < 0.15, "it never came"
    team.table.declare("t", "w", Graph(("manager", "architect", "engineer"), edges, learn=False))
    assert team.edge("manager", "architect") == edges[0]


def test_a_request_that_is_told_twice_counts_once_and_unknown_ends_are_ignored() -> None:
    team = Team()
    hop = Hop("w", "a", "r", ("nobody",))
    for _ in range(2):
        team.table.request("q1", SessionKey("t", "s"), hop, 1.0)
    team.table.finished(["q1", "q1", "nobody"], 2.0)
    assert team.graph.agents["a"].seen == 1


def test_idle_runs_are_forgotten_and_their_requests_count_as_ended() -> None:
    team = Team()
    team.ask("r1", "a", 0.0)
    assert team.graph.agents["a"].seen == 0
    team.table.tick(IDLE_S + 11.0)
    assert team.graph.agents["a"].seen == 1
    team.table.finished(["r1.a.1"], IDLE_S + 12.0)
    team.table.validate()
    assert team.ask("r1", "a", IDLE_S + 20.0)[1] == []


def test_memory_is_bounded_and_of_a_flood_only_what_nobody_declared_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callgraph_table, "MAX_RUNS", 50)
    table = Callgraphs()
    table.declare("t", "mine", Graph(("a",)))
    table.request("q", SessionKey("quiet", "s"), Hop("w", "a", "r"), 0.0)
    for i in range(MAX_WORKFLOWS + 50):
        table.request(f"q{i}", SessionKey("t", "s"), Hop(f"w{i}", f"a{i}", f"r{i}"), float(i))
    for i in range(200):
        table.request(f"p{i}", SessionKey("t", "s"), Hop("mine", f"a{i}", "r"), float(i))
    table.validate()
    known = table.of_tenant("t")
    assert len(known) == MAX_WORKFLOWS and known["mine"].declared is not None and len(known["mine"].agents) == 64
    assert table._runs["quiet"] == 1, "another tenant's flood costs nobody his runs"
    for i in range(MAX_WORKFLOWS - 1):
        table.declare("t", f"d{i}", Graph(("a",)))
    with pytest.raises(InvalidRequest, match="delete one"):
        table.declare("t", "one-more", Graph(("a",)))
    assert table.forget("t", "mine") and not table.forget("t", "mine")
    table.validate()


def test_an_erased_session_is_named_no_more() -> None:
    team = Team()
    team.chain("r1", "engineer", "qa", "engineer", "qa", "engineer")
    assert "r1:qa" in named(team.ask("r1", "engineer", 20.0)[1])
    team.table.erase(SessionKey("other", "r1:qa"))
    assert "r1:qa" in named(team.ask("r1", "engineer", 22.0)[1])
    team.table.erase(SessionKey("t", "r1:qa"))
    team.table.validate()
    for run in ("r1", "r2"):
        assert "r1:qa" not in named(team.ask(run, "engineer", 24.0)[1])
    team.table.erase(SessionKey("t", "r1:engineer"))
    team.table.validate()
    team.table.tick(25.0)
    team.table.validate()
    assert "r1:qa" not in named(team.ask("r1", "engineer", 26.0)[1])


def test_sessions_that_are_erased_together_cost_one_look_at_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    team, looks = Team(), 0
    team.chain("r1", "engineer", "qa")
    erase = Run.erase

    def counted(run: Run, gone: Set[str]) -> None:
        nonlocal looks
        looks += 1
        erase(run, gone)

    monkeypatch.setattr(Run, "erase", counted)
    for i in range(1000):
        team.table.erase(SessionKey("t", f"unknown-{i}"))
    for now in (30.0, 31.0):
        team.table.tick(now)
    assert looks == 1


def test_the_edges_that_a_tenant_declares_have_a_limit_together() -> None:
    table, agents = Callgraphs(), tuple(f"a{i}" for i in range(64))
    full = Graph(agents, tuple(Edge(s, t) for s in agents[:8] for t in agents))
    for i in range(MAX_TENANT_EDGES // len(full.edges)):
        table.declare("t", f"w{i}", full)
    with pytest.raises(InvalidRequest, match="delete one") as told:
        table.declare("t", "more", Graph(("a", "b"), (Edge("a", "b"),)))
    assert told.value.param == "edges" and table.get("t", "more") is None
    table.declare("t", "w0", full)  # again, in its own place
    table.declare("t", "none", Graph(("a",)))
    table.declare("other", "more", full)


def test_workflows_are_a_tenants_own() -> None:
    team = Team()
    team.chain("r1", "a", "b")
    hops, _ = team.table.request("x", SessionKey("other", "s"), Hop("w", "a", "r1"), 10.0)
    assert hops == [] and set(team.table.of_tenant("other")) == {"w"}


def test_a_stored_graph_is_the_same_graph_and_a_broken_one_is_refused() -> None:
    team = Team()
    team.table.declare("t", "w", Graph(("a", "b"), (Edge("a", "b", 0.5, 2.0, 3.0),)))
    for i in range(3):
        team.chain(f"r{i}", "a", "b", "a")
    stored = json.loads(json.dumps(to_stored("t", "w", team.graph)))
    tenant, name, graph = from_stored(stored)
    assert (
        (tenant, name) == ("t", "w")
        and graph.next("a") == team.graph.next("a")
        and to_stored("t", "w", graph) == stored
    )
    for wrong in ({}, [], stored | {"format": 2}, stored | {"agents": [{"name": "a"}]}, stored | {"agents": 3}):
        with pytest.raises(ValueError, match=r"format|not a workflow"):
            from_stored(wrong)


# ---- what the scheduler does with it --------------------------------------------------------------------------
class Fleet(Harness):
    """A fleet in which every session of a request is held where it was placed."""

    asked = 0

    def ask(
        self, run: str, agent: str, now: float, ended: tuple[str, ...] = (), priority: int = 0
    ) -> tuple[str, list[Prefetch]]:
        self.asked += 1
        key, request_id = SessionKey("t", f"{run}:{agent}"), f"q{self.asked}"
        for node in self.fleet.devices:
            self.fleet.loaded(node, LoadReport(), [], [], now)
        placed = self.place(Ask(request_id, key, "m", priority, hop=Hop("w", agent, run, ended)), now)
        self.hold(placed.node, 960, key)
        self.validate()
        return request_id, [c for c in placed.commands if isinstance(c, Prefetch)]


def test_a_request_of_an_agent_sends_its_next_hops_cache_on_its_way() -> None:
    fleet = Fleet()
    last: tuple[str, ...] = ()
    for i, agent in enumerate(["manager", "architect", "manager", "architect"]):
        request, prefetches = fleet.ask("r", agent, 4.0 * i, last, priority=3)
        last = (request,)
    assert [(p.hint.session.session_id, p.hint.arrival_s, p.hint.priority) for p in prefetches] == [
        ("r:manager", 16.0, 3)
    ]
    pending = fleet.advisories.get(SessionKey("t", "r:manager"))
    assert pending is not None and pending.node == prefetches[0].node
    assert pending.chance == pytest.approx(fleet.trust.chance("t/w", "") * prefetches[0].hint.chance)


def test_hints_that_we_invented_and_that_did_not_come_true_cost_the_tenant_nothing() -> None:
    fleet = Fleet()
    last: tuple[str, ...] = ()
    for i in range(10):
        for j, agent in enumerate(["manager", "architect"]):
            last = (fleet.ask(f"r{i}", agent, 100.0 * i + j, last if j else ())[0],)
    for i in range(10, 20):
        manager, prefetches = fleet.ask(f"r{i}", "manager", 100.0 * i)
        fleet.callgraphs.finished([manager], 100.0 * i + 1)
        assert prefetches or i > 12
        fleet.tick(100.0 * i + 99)
    assert fleet.advisories.outcomes["expired"] >= 3
    assert fleet.trust.chance("t", "") == Trust(1.0, 1.0).chance("t", "") > fleet.trust.chance("t/w", "")


def test_a_callers_own_hint_is_not_replaced_by_ours() -> None:
    fleet = Fleet()
    last = (fleet.ask("r", "manager", 0.0)[0],)
    last = (fleet.ask("r", "architect", 4.0, last)[0],)
    own = fleet.advise(hint(SessionKey("t", "r:architect"), "mine"), 5.0)
    assert own
    _, prefetches = fleet.ask("r", "manager", 8.0, last)
    assert prefetches == []
    pending = fleet.advisories.get(SessionKey("t", "r:architect"))
    assert pending is not None and pending.hint.advisory_id == "mine" and pending.chance > 0.8


# ---- declared graphs ------------------------------------------------------------------------------------------
GRAPH = {"agents": ["a", "b"], "edges": [{"from": "a", "to": "b", "probability": 0.5, "calls": 2, "delay_s": 1.5}]}


@pytest.mark.parametrize(
    ("data", "param"),
    [
        ([], None),
        ({}, "agents"),
        ({"agents": []}, "agents"),
        ({"agents": ["a"] * 2}, "agents[1]"),
        ({"agents": ["a", "b c"]}, "agents[1]"),
        ({"agents": ["a", 3]}, "agents[1]"),
        ({"agents": [f"a{i}" for i in range(65)]}, "agents"),
        (GRAPH | {"edges": {}}, "edges"),
        (GRAPH | {"edges": [3]}, "edges[0]"),
        (GRAPH | {"edges": [{"from": "a"}]}, "edges[0].to"),
        (GRAPH | {"edges": [{"from": "a", "to": "c"}]}, "edges[0].to"),
        (GRAPH | {"edges": [{"from": ["a"], "to": "a"}]}, "edges[0].from"),
        (GRAPH | {"edges": [{"from": "a", "to": "b"}] * 2}, "edges[1]"),
        (GRAPH | {"edges": [{"from": "a", "to": "b", "probability": 1.1}]}, "edges[0].probability"),
        (GRAPH | {"edges": [{"from": "a", "to": "b", "probability": float("nan")}]}, "edges[0].probability"),
        (GRAPH | {"edges": [{"from": "a", "to": "b", "probability": True}]}, "edges[0].probability"),
        (GRAPH | {"edges": [{"from": "a", "to": "b", "delay_s": -1}]}, "edges[0].delay_s"),
        (GRAPH | {"edges": [{"from": "a", "to": "b", "delay_s": 10**400}]}, "edges[0].delay_s"),
        (GRAPH | {"edges": [{"from": "a", "to": "b", "calls": 0.5}]}, "edges[0].calls"),
        (GRAPH | {"edges": [{"from": "a", "to": "b", "weight": 1}]}, "edges[0].weight"),
        (GRAPH | {"learn": 1}, "learn"),
        (GRAPH | {"nodes": []}, "nodes"),
    ],
)
def test_a_graph_that_is_wrong_is_refused_naming_the_field(data: object, param: str | None) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_graph(data)
    assert refused.value.param == param


def test_a_graph_reads_as_it_was_written_and_runs_are_named_after_sessions() -> None:
    graph = parse_graph(GRAPH)
    assert graph == Graph(("a", "b"), (Edge("a", "b", 0.5, 2.0, 1.5),)) and parse_graph(graph_to_json(graph)) == graph
    assert [default_run(s) for s in ("job:7:qa", "chat", ":x", "x:")] == ["job:7", "chat", ":x", "x"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["r1", "r2"]),
            st.sampled_from("abc"),
            st.sampled_from("xyz"),
            st.floats(0, 30),
            st.sets(st.integers(0, 9)),
        ),
        max_size=60,
    )
)
@settings(max_examples=60, deadline=None)
def test_whatever_comes_in_whatever_order_the_tables_agree(steps: list[tuple[str, str, str, float, set[int]]]) -> None:
    table, now = Callgraphs(), 0.0
    for i, (run, agent, session, wait, ended) in enumerate(steps):
        now += wait
        ids = tuple(f"q{i - back}" for back in sorted(ended))
        hop = Hop("w", agent, run, ids if i % 2 else ())
        hops, _ = table.request(f"q{i}", SessionKey("t", f"{run}:{session}"), hop, now)
        assert all(0.1 <= h.chance <= 1.0 and h.arrival_s >= now for h in hops) and len(
            {h.session for h in hops}
        ) <= len(hops)
        if i % 3 == 0:
            table.finished(ids, now)
        if i % 7 == 6:
            table.erase(SessionKey("t", f"{run}:{session}"))
        table.tick(now)
        table.validate()
