"""Users of a closed loop read, type and ask; agents wait for each other; hints go as planned; several endpoints share
the work."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise

import pytest
from fake_openai_server import FakeOpenAI

from loadtest.agents import WORKFLOW, team_projects
from loadtest.balance import Balance, Balancer
from loadtest.client import Endpoint, Outcome
from loadtest.habits import Habits
from loadtest.plans import HintPlan, PlannedSession, PlannedTurn, Pretence, jobs, turns_of
from loadtest.traces import Message
from loadtest.users import Loop, run_load
from loadtest.variants import with_habits, with_priorities
from runtime.clock import RealClock


def talk(name: str, turns: int = 2, **of_turns: object) -> PlannedSession:
    made = [PlannedTurn(f"{name} {i}", 2, 0.0, 0.02, reading_s=0.03, **of_turns) for i in range(turns)]  # type: ignore[arg-type]
    return PlannedSession(name, tuple(made))


async def hold(
    server: FakeOpenAI, *sessions: PlannedSession, loop: Loop | None = None, **endpoint: object
) -> list[Outcome]:
    return await run_load(Endpoint(server.url, "m", **endpoint), sessions, RealClock(), loop=loop)  # type: ignore[arg-type]


async def test_so_many_users_hold_so_many_conversations_at_a_time() -> None:
    async with FakeOpenAI() as server:
        outcomes = await hold(server, *(talk(f"s{i}") for i in range(6)), loop=Loop(users=2))
    assert len(outcomes) == 12
    for person in (0, 1):
        mine = [o for o in outcomes if int(o.session_id[1:]) % 2 == person]
        assert [o.session_id for o in mine] == [f"s{n}" for n in range(person, 6, 2) for _ in range(2)], (
            "one after the other, in the plan's order"
        )
        for before, after in pairwise(mine):
            assert after.sent_s - before.end_s >= 0.05, "reading and typing come between an answer and the next prompt"


async def test_no_request_begins_after_the_loads_time() -> None:
    async with FakeOpenAI() as server:
        outcomes = await hold(server, *(talk(f"s{i}", turns=50) for i in range(2)), loop=Loop(users=2, seconds=0.3))
    assert outcomes and len(outcomes) < 100
    assert all(o.error is None for o in outcomes)
    assert max(o.planned_s for o in outcomes) <= 0.3


async def test_an_agent_waits_for_what_it_needs_and_a_project_for_all_its_agents() -> None:
    first = PlannedSession("a", (PlannedTurn("a0", 2, 0.0, 0.0, hint=None),), job="p")
    second = PlannedSession("b", (PlannedTurn("b0", 2, 0.0, 0.05, hint=None, after=(("a", 0),)),), job="p")
    async with FakeOpenAI() as server:
        outcomes = await hold(server, first, second, replace(first, session_id="c", job="q"), loop=Loop(users=1))
    a, b, c = outcomes
    assert [o.session_id for o in outcomes] == ["a", "b", "c"]
    assert b.sent_s - a.end_s >= 0.05 and c.sent_s >= b.end_s


async def test_who_needs_an_answer_that_failed_does_not_ask() -> None:
    first = PlannedSession("a", (PlannedTurn("a0", 2, 0.0, 0.0),), job="p")
    second = PlannedSession("b", (PlannedTurn("b0", 2, 0.0, 0.0, after=(("a", 0),)),), job="p")
    async with FakeOpenAI(fail_sessions={"a"}) as server:
        outcomes = await hold(server, first, second)
    assert [(o.session_id, o.error is None) for o in outcomes] == [("a", False)]


async def test_a_team_of_agents_holds_a_project() -> None:
    planned = team_projects(1, files=2, seed=3, time_scale=0.001)
    async with FakeOpenAI() as server:
        outcomes = await hold(server, *planned, workflows=True)
        asked = [(c.headers["X-Upbeat-Agent"], c.headers["X-Upbeat-Workflow"]) for c in server.calls("chat")]
    assert len(outcomes) == turns_of(planned) and all(o.error is None for o in outcomes)
    agents = [agent for agent, _ in asked]
    assert agents[:3] == ["manager", "architect", "engineer"] and agents[-1] == "manager"
    assert set(agents[2:-1]) == {"engineer", "reviewer"} and agents.count("engineer") >= 2
    assert {workflow for _, workflow in asked} == {WORKFLOW}
    manager = next(c for c in server.calls("chat"))
    assert [m["role"] for m in manager.body["messages"]] == ["system", "user"]


def test_teams_are_drawn_from_their_seed_and_briefs_are_shared() -> None:
    one, again, other = (team_projects(2, files=3, seed=seed) for seed in (1, 1, 2))
    assert one == again != other
    assert len(jobs(one)) == 2 and len({s.session_id for s in one}) == len(one)
    briefs = {s.turns[0].messages[0] for s in one if ":engineer" in s.session_id}
    assert len(briefs) == 1 and next(iter(briefs)).role == "system"


async def test_late_hints_come_later_early_ones_sooner_and_missed_ones_not() -> None:
    turns = tuple(
        PlannedTurn(f"t{i}", 2, 0.5 * (i + 1), 0.25, hint=hint)
        for i, hint in enumerate(
            (HintPlan(), HintPlan(0.2), HintPlan(-0.2), HintPlan(0.3), None, HintPlan(expected=False))
        )
    )
    async with FakeOpenAI() as server:
        outcomes = await hold(server, PlannedSession("s", turns), hints=True)
    leads = [None if o.hint is None else o.sent_s - o.hint.sent_s for o in outcomes]
    assert leads[3] is None and leads[4] is None, "a hint that would come after its request is not sent"
    on_time, late, early = leads[0], leads[1], leads[2]
    assert on_time is not None and late is not None and early is not None
    assert late < on_time < early
    assert [h.body["expected_arrival"] is None for h in server.calls("hint")] == [False, False, False, True]


async def test_hints_for_nothing_are_sent_and_nobody_waits_for_them() -> None:
    turn = PlannedTurn("t", 2, 0.0, 0.0, hint=None, pretences=(Pretence(0.0, "other"), Pretence(500.0, "never")))
    second = PlannedTurn("u", 2, 0.1, 0.05, hint=None)
    async with FakeOpenAI() as server:
        await asyncio.wait_for(hold(server, PlannedSession("s", (turn, second)), hints=True), 20)
    assert [h.session_id for h in server.calls("hint")] == ["other"]


async def test_priorities_go_with_hints_and_requests_where_they_are_taken() -> None:
    session = replace(talk("s", turns=1), priority=-1)
    for taken in (True, False):
        async with FakeOpenAI() as server:
            await hold(server, session, hints=True, priorities=taken)
        assert server.calls("chat")[0].body.get("priority") == (-1 if taken else None)
        assert server.calls("hint")[0].body["priority"] == -1


async def test_tenants_and_models_are_asked_by_their_keys_and_names() -> None:
    sessions = [
        replace(talk(n, turns=1), tenant=t, model=m)
        for n, t, m in (("a", "x", "big"), ("b", "y", "small"), ("c", "", ""))
    ]
    async with FakeOpenAI() as server:
        await hold(server, *sessions, api_keys={"x": "kx", "y": "ky"}, models={"big": "b-70", "small": "s-8"})
        said = {c.session_id: (c.body["model"], c.headers.get("Authorization")) for c in server.calls("chat")}
    assert said == {"a": ("b-70", "Bearer kx"), "b": ("s-8", "Bearer ky"), "c": ("m", None)}


async def test_a_turn_may_say_a_traces_own_messages_and_fields() -> None:
    turn = PlannedTurn(
        "unused", 2, 0.0, 0.0, messages=(Message("system", "be brief"), Message("user", "hi")), extra=(("top_p", 0.5),)
    )
    async with FakeOpenAI() as server:
        await hold(server, PlannedSession("s", (turn,)))
    (call,) = server.calls("chat")
    assert call.body["messages"] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert call.body["top_p"] == 0.5


@pytest.mark.parametrize(("balance", "split"), [("round-robin", {"a": 2, "b": 2}), ("sticky", {"a": 1, "b": 1})])
async def test_two_instances_share_sessions_or_requests(balance: Balance, split: dict[str, int]) -> None:
    async with FakeOpenAI() as one, FakeOpenAI() as two:
        endpoints = [Endpoint(one.url, "m"), Endpoint(two.url, "m")]
        outcomes = await run_load(endpoints, [talk("a"), talk("b")], RealClock(), loop=Loop(users=1), balance=balance)
        used = {s: sum(bool(server.calls("chat", s)) for server in (one, two)) for s in ("a", "b")}
    assert used == split
    assert {o.node for o in outcomes} == {"instance-0", "instance-1"}


def test_a_balancer_counts_what_is_under_way() -> None:
    balancer = Balancer(2, "least-busy")
    assert [balancer.pick("a"), balancer.pick("a"), balancer.pick("b")] == [0, 1, 0]
    balancer.done(1)
    assert balancer.pick("c") == 1 and balancer.busy == [2, 1]
    with pytest.raises(ValueError, match="needs an endpoint"):
        Balancer(0)


def test_sticky_sessions_may_begin_where_least_is_under_way() -> None:
    balancer = Balancer(3, "sticky-least-busy")
    assert [balancer.pick("a"), balancer.pick("b"), balancer.pick("a")] == [0, 1, 0]
    balancer.done(1)
    assert [balancer.pick("c"), balancer.pick("b"), balancer.pick("d")] == [1, 1, 2]
    assert balancer.busy == [2, 2, 1]


def test_habits_are_drawn_apart_from_each_other() -> None:
    sessions = [talk(f"s{i}", turns=4) for i in range(100)]
    none = with_habits(sessions, Habits(), 1)
    assert none == sessions
    some = with_habits(sessions, Habits(missed=0.25, late=0.5, spurious=0.5), 1)
    turns = [t for s in some for t in s.turns]
    assert 70 < sum(t.hint is None for t in turns) < 130
    assert 100 < sum(t.hint is not None and t.hint.offset_s > 0 for t in turns) < 200
    assert 150 < sum(len(t.pretences) for t in turns) < 250
    more = with_habits(sessions, Habits(missed=0.25, late=0.5, early=0.2, spurious=0.5), 1)
    missed = [[t.hint is None for s in plan for t in s.turns] for plan in (some, more)]
    assert missed[0] == missed[1], "whose hints are missed does not follow from how others go"
    earlier = {s.session_id: {x.session_id for x in some[:i]} for i, s in enumerate(some)}
    assert all(p.session_id in earlier[s.session_id] for s in some for t in s.turns for p in t.pretences)


def test_jobs_are_urgent_as_a_whole() -> None:
    planned = with_priorities(team_projects(20, files=2, seed=1), 0.5, seed=4)
    by_job = {}
    for session in planned:
        by_job.setdefault(session.job, set()).add(session.priority)
    assert all(len(found) == 1 for found in by_job.values())
    assert {next(iter(found)) for found in by_job.values()} == {0, -1}
