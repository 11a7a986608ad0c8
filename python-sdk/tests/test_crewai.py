"""The listener in the real CrewAI: the next agent's hint is there before its request. Run by `make sdk-frameworks`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true", "CREWAI_TRACING_ENABLED": "false"}
pytest.importorskip("crewai")

from crewai import LLM, Agent, Crew, Process, Task
from crewai.tools import tool
from scripted_server import Reply, ScriptedServer, serving

import upbeat
from upbeat.crewai import UpbeatInterceptor, UpbeatListener, may_follow


@pytest.fixture
def listeners() -> Iterator[list[UpbeatListener]]:
    """What a test makes hears of nothing afterwards."""
    made: list[UpbeatListener] = []
    yield made
    for listener in made:
        listener.remove()


def agent(server: ScriptedServer, role: str, **more: Any) -> Agent:
    llm = LLM(model="openai/gpt-4o-mini", base_url=f"{server.url}/v1", api_key="none", interceptor=UpbeatInterceptor())
    return Agent(role=role, goal="Do it.", backstory="You can.", llm=llm, verbose=False, **more)


def task(who: Agent, what: str) -> Task:
    return Task(description=what, expected_output="text", agent=who)


def crew(*agents_and_tasks: Any) -> Crew:
    agents = [a for a in agents_and_tasks if isinstance(a, Agent)]
    return Crew(
        agents=agents,
        tasks=[t for t in agents_and_tasks if isinstance(t, Task)],
        process=Process.sequential,
        verbose=False,
    )


def test_the_next_tasks_agent_is_hinted_while_the_first_one_answers(listeners: list[UpbeatListener]) -> None:
    with (
        serving(Reply("A clock.", after_hint="job7:Critic"), Reply("Good.")) as server,
        upbeat.AdvisoryClient(server.url) as client,
    ):
        listeners.append(UpbeatListener(client, "team"))
        writer, critic = agent(server, "Writer"), agent(server, "Critic")
        with upbeat.in_run("job7"):
            result = crew(writer, critic, task(writer, "Design."), task(critic, "Judge.")).kickoff()
        assert "Good." in str(result) and client.flush()
        order = server.order()
        assert [session for _, session in server.order("request")] == ["job7:Writer", "job7:Critic"]
        assert order.index(("advise", "job7:Critic")) < order.index(("request", "job7:Critic"))
        headers = [r.headers for r in server.requests()]
        assert [(h["x-upbeat-workflow"], h["x-upbeat-agent"], h["x-upbeat-run"]) for h in headers] == [
            ("team", "Writer", "job7"),
            ("team", "Critic", "job7"),
        ]


def test_a_tool_that_starts_hints_its_agent(listeners: list[UpbeatListener]) -> None:
    with (
        serving(Reply(calls=(("look_up", {"what": "clock"}),)), Reply("It ticks.")) as server,
        upbeat.AdvisoryClient(server.url) as client,
    ):
        listeners.append(UpbeatListener(client, "desk"))
        seen: list[bool] = []

        @tool("look_up")
        def look_up(what: str) -> str:
            """Look something up."""
            seen.append(server.wait_hint("job8:Clerk"))
            return "ticks"

        clerk = agent(server, "Clerk", tools=[look_up])
        with upbeat.in_run("job8"):
            crew(clerk, task(clerk, "What does it do?")).kickoff()
        assert seen == [True], "while the tool runs, the hint is there"
        assert client.flush()
        assert [e for e in server.order() if e[0] != "invalidate"] == [
            ("request", "job8:Clerk"),
            ("advise", "job8:Clerk"),
            ("request", "job8:Clerk"),
        ]


def test_without_a_named_run_it_is_the_crews(listeners: list[UpbeatListener]) -> None:
    with serving(Reply("A clock."), Reply("Good.")) as server, upbeat.AdvisoryClient(server.url) as client:
        listeners.append(UpbeatListener(client, "team"))
        writer, critic = agent(server, "Fact Finder"), agent(server, "Critic")
        made = crew(writer, critic, task(writer, "Design."), task(critic, "Judge."))
        made.kickoff()
        assert [r.session for r in server.requests()] == [f"{made.id}:Fact-Finder", f"{made.id}:Critic"]
        assert server.wait_hint(f"{made.id}:Critic") and client.counters.invalid == 0


def test_requests_that_follow_a_crew_are_not_its_agents(listeners: list[UpbeatListener]) -> None:
    with serving(Reply("A clock."), Reply("Mine.")) as server, upbeat.AdvisoryClient(server.url) as client:
        listeners.append(UpbeatListener(client, "team"))
        writer = agent(server, "Writer")
        with upbeat.in_run("job9"):
            crew(writer, task(writer, "Design.")).kickoff()
            writer.llm.call("?")
        assert [r.session for r in server.requests()] == ["job9:Writer", None]


def test_what_was_removed_hears_nothing() -> None:
    with serving(Reply("A clock."), Reply("Good.")) as server, upbeat.AdvisoryClient(server.url) as client:
        UpbeatListener(client, "team").remove()
        writer, critic = agent(server, "Writer"), agent(server, "Critic")
        crew(writer, critic, task(writer, "Design."), task(critic, "Judge.")).kickoff()
        assert client.flush() and server.order() == [("request", None)] * 2


def test_who_may_follow_whom() -> None:
    with serving() as server:
        writer, critic, editor = (
            agent(server, "Writer", allow_delegation=True),
            agent(server, "Critic"),
            agent(server, "Editor"),
        )
        first, second = task(writer, "Design."), task(critic, "Judge.")
        made = crew(writer, critic, editor, first, second)
        assert may_follow(writer, first, made) == ["Critic", "Editor"]
        assert may_follow(critic, second, made) == [] and may_follow(critic, second, None) == []
