"""The middleware in the real Microsoft Agent Framework: the next agent's hint is there before its request."""

from __future__ import annotations

import asyncio
from typing import Any

from agent_framework import Agent, tool
from agent_framework.openai import OpenAIChatCompletionClient
from agent_framework.orchestrations import HandoffBuilder, SequentialBuilder
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from scripted_server import Reply, ScriptedServer, serving

import upbeat
from upbeat.agent_framework import UpbeatMiddleware


def model(server: ScriptedServer) -> OpenAIChatCompletionClient:
    http = DefaultAsyncHttpxClient(event_hooks=upbeat.async_event_hooks())
    return OpenAIChatCompletionClient(
        model="m", async_client=AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=http)
    )


def agent(server: ScriptedServer, hooks: UpbeatMiddleware, name: str, **more: Any) -> Agent:
    return Agent(client=model(server), name=name, instructions=f"You are {name}.", middleware=hooks.all, **more)


async def test_the_next_agent_of_a_workflow_is_hinted_while_the_first_one_answers() -> None:
    with serving(Reply("A clock.", after_hint="job7:critic"), Reply("Good.")) as server:
        client = upbeat.AsyncAdvisoryClient(server.url)
        hooks = UpbeatMiddleware(client, "team")
        workflow = hooks.knows(
            SequentialBuilder(participants=[agent(server, hooks, "writer"), agent(server, hooks, "critic")]).build()
        )
        assert hooks.may_follow("writer") == ("critic",) and hooks.may_follow("critic") == ()
        with hooks.run("job7"):
            await workflow.run("Design something.")
        assert await client.flush()
        assert server.order("request") == [("request", "job7:writer"), ("request", "job7:critic")]
        assert server.order().index(("advise", "job7:critic")) < server.order().index(("request", "job7:critic"))
        headers = [r.headers for r in server.requests()]
        assert [(h["x-upbeat-workflow"], h["x-upbeat-agent"], h["x-upbeat-run"]) for h in headers] == [
            ("team", "writer", "job7"),
            ("team", "critic", "job7"),
        ]
        await client.close()


async def test_a_streamed_workflow_is_hinted_and_named_too() -> None:
    with serving(Reply("A clock.", after_hint="job8:critic"), Reply("Good.")) as server:
        client = upbeat.AsyncAdvisoryClient(server.url)
        hooks = UpbeatMiddleware(client, "team")
        workflow = hooks.knows(
            SequentialBuilder(participants=[agent(server, hooks, "writer"), agent(server, hooks, "critic")]).build()
        )
        with hooks.run("job8"):
            async for _ in workflow.run("Design something.", stream=True):
                pass
        assert [r.session for r in server.requests()] == ["job8:writer", "job8:critic"]
        assert all(r.body.get("stream") for r in server.requests())
        await client.close()


async def test_agents_that_hand_over_to_each_other_are_all_hinted() -> None:
    with serving(Reply(calls=(("handoff_to_refunds", {}),), after_hint="job5:refunds"), Reply("Done.")) as server:
        client = upbeat.AsyncAdvisoryClient(server.url)
        hooks = UpbeatMiddleware(client, "desk")
        names = ("triage", "refunds", "billing")
        triage, *others = (
            agent(server, hooks, name, require_per_service_call_history_persistence=True) for name in names
        )
        workflow = hooks.knows(
            HandoffBuilder(name="desk", participants=[triage, *others]).with_start_agent(triage).build()
        )
        assert hooks.may_follow("triage") == ("refunds", "billing")
        with hooks.run("job5"):
            await workflow.run("My money!")
        assert await client.flush() and ("advise", "job5:billing") in server.order()
        assert [r.session for r in server.requests()] == ["job5:triage", "job5:refunds"]
        withdrawn = [session for kind, session in server.order() if kind == "invalidate"]
        assert sorted(withdrawn) == ["job5:billing", "job5:triage"], "refunds could have handed over to both"
        await client.close()


async def test_a_tool_that_starts_hints_its_agent_streamed_or_not() -> None:
    for stream in (False, True):
        with serving(Reply(calls=(("look_up", {"what": "clock"}),)), Reply("It ticks.")) as server:
            client = upbeat.AsyncAdvisoryClient(server.url)
            hooks = UpbeatMiddleware(client, "desk")
            seen: list[bool] = []

            async def look_up(what: str) -> str:
                """Look something up."""
                seen.append(await asyncio.to_thread(server.wait_hint, "chat-1:clerk"))  # noqa: B023
                return "ticks"

            clerk = agent(server, hooks, "clerk", tools=[tool(look_up, approval_mode="never_require")])
            session = clerk.create_session(session_id="chat-1")
            if stream:
                async for _ in clerk.run("What does it do?", session=session, stream=True):
                    pass
            else:
                await clerk.run("What does it do?", session=session)
            assert seen == [True], "while the tool runs, the hint is there"
            assert server.order() == [
                ("request", "chat-1:clerk"),
                ("advise", "chat-1:clerk"),
                ("request", "chat-1:clerk"),
            ]
            await client.close()


async def test_what_follows_can_be_said_where_no_workflow_is_built() -> None:
    with serving(Reply("A clock.", after_hint="job9:critic"), Reply("Good.")) as server:
        client = upbeat.AsyncAdvisoryClient(server.url)
        hooks = UpbeatMiddleware(client, "team", follows={"writer": ["critic", "editor"]})
        with hooks.run("job9"):
            await agent(server, hooks, "writer").run("Write.")
            await agent(server, hooks, "critic").run("Judge.")
        assert await client.flush()
        assert server.order()[-1] == ("invalidate", "job9:editor"), (
            "what did not come true is withdrawn when the run ends"
        )
        await client.close()


async def test_requests_that_follow_a_run_are_not_its_agents() -> None:
    for stream in (False, True):
        with serving(Reply("Hi."), Reply("Mine.")) as server:
            client = upbeat.AsyncAdvisoryClient(server.url)
            clerk = agent(server, UpbeatMiddleware(client, "desk"), "clerk")
            session = clerk.create_session(session_id="chat-1")
            if stream:
                async for _ in clerk.run("?", session=session, stream=True):
                    pass
            else:
                await clerk.run("?", session=session)
            plain = Agent(client=clerk.client, name="plain")
            await plain.run("?")
            assert [r.session for r in server.requests()] == ["chat-1:clerk", None]
            await client.close()


async def test_an_agent_without_a_session_or_a_run_works_without_hints() -> None:
    with serving(Reply("Fine.")) as server:
        client = upbeat.AsyncAdvisoryClient(server.url)
        hooks = UpbeatMiddleware(client, "team", follows={"writer": ["critic"]})
        assert (await agent(server, hooks, "writer").run("Write.")).text == "Fine."
        assert await client.flush() and server.order() == [("request", None)] and client.counters.invalid == 1
        await client.close()
