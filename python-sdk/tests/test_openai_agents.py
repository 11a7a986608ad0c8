"""The hooks in the real OpenAI Agents SDK: the next hop's hint is there before its request."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    RunConfig,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from agents.tracing import set_trace_processors, trace
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from scripted_server import Reply, ScriptedServer, serving

import upbeat
from upbeat.openai_agents import UpbeatRunHooks, UpbeatTracingProcessor


@pytest.fixture(autouse=True)
def no_export() -> Any:
    """Traces go nowhere."""
    set_trace_processors([])
    yield
    set_trace_processors([])
    set_tracing_disabled(False)


def model(server: ScriptedServer) -> OpenAIChatCompletionsModel:
    http = DefaultAsyncHttpxClient(event_hooks=upbeat.async_event_hooks())
    return OpenAIChatCompletionsModel(
        "m", AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=http, max_retries=0)
    )


def team(server: ScriptedServer) -> Agent[Any]:
    """triage -> (billing | refunds)."""
    billing, refunds = (
        Agent(name=name, instructions=f"You are {name}.", model=model(server)) for name in ("billing", "refunds")
    )
    return Agent(name="triage", instructions="Hand off.", model=model(server), handoffs=[billing, refunds])


async def test_every_possible_next_agent_is_hinted_while_the_first_one_answers() -> None:
    with serving(Reply(calls=(("transfer_to_refunds", {}),), after_hint="job7:refunds"), Reply("Done.")) as server:
        client = upbeat.AsyncAdvisoryClient(server.url)
        hooks = UpbeatRunHooks(client, "help desk", run="job7")
        result = await Runner.run(
            team(server), "My money!", hooks=hooks, run_config=RunConfig(call_model_input_filter=hooks.name_request)
        )
        assert result.final_output == "Done." and await client.flush()
        order = server.order()
        assert order.index(("advise", "job7:refunds")) < order.index(("request", "job7:refunds"))
        assert order.index(("advise", "job7:billing")) < order.index(("request", "job7:refunds")), (
            "both are possible, both are hinted"
        )
        assert order[-1] == ("invalidate", "job7:billing"), "what did not come true is withdrawn at the end"
        first, second = server.requests()
        assert (first.headers["x-upbeat-workflow"], first.headers["x-upbeat-agent"], first.headers["x-upbeat-run"]) == (
            "help-desk",
            "triage",
            "job7",
        )
        assert (second.headers["x-upbeat-agent"], second.headers["x-session-id"]) == ("refunds", "job7:refunds")
        assert client.counters.failed == client.counters.dropped == client.counters.invalid == 0


async def test_a_tool_that_starts_hints_the_agent_that_will_be_told_its_result() -> None:
    with serving(Reply(calls=(("look_up", {"what": "clock"}),)), Reply("It ticks.")) as server:
        client = upbeat.AsyncAdvisoryClient(server.url)
        seen: list[bool] = []

        @function_tool
        async def look_up(what: str) -> str:
            seen.append(await asyncio.to_thread(server.wait_hint, "job8:clerk"))
            return "ticks"

        clerk = Agent(name="clerk", model=model(server), tools=[look_up])
        hooks = UpbeatRunHooks(client, "desk")
        with upbeat.in_run("job8"):
            await Runner.run(
                clerk, "What does it do?", hooks=hooks, run_config=RunConfig(call_model_input_filter=hooks.name_request)
            )
        assert seen == [True], "while the tool runs, the hint is there"
        assert server.order() == [("request", "job8:clerk"), ("advise", "job8:clerk"), ("request", "job8:clerk")]
        await client.close()


async def test_conversations_at_the_same_time_do_not_mix() -> None:
    with serving(*[Reply("Yes.")] * 6) as server:
        client = upbeat.AsyncAdvisoryClient(server.url)
        hooks = UpbeatRunHooks(client, "desk")
        clerk = Agent(name="clerk", model=model(server))
        await asyncio.gather(
            *(
                Runner.run(
                    clerk,
                    f"I am {i}",
                    hooks=hooks,
                    run_config=RunConfig(group_id=f"chat-{i}", call_model_input_filter=hooks.name_request),
                )
                for i in range(6)
            )
        )
        asked = {r.body["messages"][-1]["content"]: r.session for r in server.requests()}
        assert asked == {f"I am {i}": f"chat-{i}:clerk" for i in range(6)}
        await client.close()


async def test_streamed_runs_are_hinted_and_named_too() -> None:
    with serving(Reply(calls=(("transfer_to_billing", {}),), after_hint="job9:billing"), Reply("Paid.")) as server:
        client = upbeat.AsyncAdvisoryClient(server.url)
        hooks = UpbeatRunHooks(client, "desk", run="job9")
        streamed = Runner.run_streamed(
            team(server), "Bill me", hooks=hooks, run_config=RunConfig(call_model_input_filter=hooks.name_request)
        )
        async for _ in streamed.stream_events():
            pass
        assert [r.session for r in server.requests()] == ["job9:triage", "job9:billing"]
        await client.close()


async def test_the_tracing_processor_does_the_same_from_spans_alone() -> None:
    with serving(Reply(calls=(("transfer_to_refunds", {}),), after_hint="chat-1:refunds"), Reply("Done.")) as server:
        client = upbeat.AsyncAdvisoryClient(server.url)
        set_trace_processors([UpbeatTracingProcessor(client, "desk")])
        with trace("help", group_id="chat-1"):
            await Runner.run(team(server), "My money!")
        assert await client.flush()
        assert [r.session for r in server.requests()] == ["chat-1:triage", "chat-1:refunds"]
        order = server.order()
        assert order.index(("advise", "chat-1:refunds")) < order.index(("request", "chat-1:refunds"))
        assert ("invalidate", "chat-1:billing") in order
        await client.close()


async def test_without_a_trace_or_a_run_nothing_is_sent_and_nothing_breaks(caplog: pytest.LogCaptureFixture) -> None:
    set_tracing_disabled(True)
    with serving(Reply(calls=(("transfer_to_billing", {}),)), Reply("Fine.")) as server:
        client = upbeat.AsyncAdvisoryClient(server.url)
        hooks = UpbeatRunHooks(client, "desk")
        result = await Runner.run(
            team(server), "?", hooks=hooks, run_config=RunConfig(call_model_input_filter=hooks.name_request)
        )
        assert result.final_output == "Fine." and server.order() == [("request", None)] * 2
        assert client.counters.invalid > 1 and sum("run" in r.message for r in caplog.records) == 1
        await client.close()


async def test_requests_that_follow_a_run_are_not_its_agents() -> None:
    with serving(Reply("Hi."), Reply("Mine."), Reply("Hi."), Reply("Mine.")) as server:
        client = upbeat.AsyncAdvisoryClient(server.url)
        asks = model(server)
        hooks = UpbeatRunHooks(client, "desk", run="job1")
        clerk = Agent(name="clerk", model=asks)
        await Runner.run(clerk, "?", hooks=hooks, run_config=RunConfig(call_model_input_filter=hooks.name_request))
        await asks._client.chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}])
        set_trace_processors([UpbeatTracingProcessor(client, "desk")])
        with trace("help", group_id="chat-1"):
            await Runner.run(clerk, "?")
            await asks._client.chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}])
        assert [r.session for r in server.requests()] == ["job1:clerk", None, "chat-1:clerk", None]
        await client.close()


async def test_an_agent_that_runs_as_a_tool_does_not_speak_in_its_callers_session() -> None:
    with serving(Reply(calls=(("ask_expert", {"input": "why"}),)), Reply("Because."), Reply("It is so.")) as server:
        client = upbeat.AsyncAdvisoryClient(server.url)
        hooks = UpbeatRunHooks(client, "desk", run="job2")
        expert = Agent(name="expert", model=model(server)).as_tool("ask_expert", "Asks an expert.")
        clerk = Agent(name="clerk", model=model(server), tools=[expert])
        await Runner.run(clerk, "?", hooks=hooks, run_config=RunConfig(call_model_input_filter=hooks.name_request))
        first, inner, last = [r.session for r in server.requests()]
        assert (first, last) == ("job2:clerk", "job2:clerk") and inner in (None, "job2:expert")
        await client.close()


async def test_headers_set_by_hand_on_an_agent_stay() -> None:
    with serving(Reply("Hi.")) as server:
        client = upbeat.AsyncAdvisoryClient(server.url)
        hooks = UpbeatRunHooks(client, "desk", run="job1")
        by_hand = ModelSettings(extra_headers={"X-Session-Id": "mine"})
        clerk = Agent(name="clerk", model=model(server), model_settings=by_hand)
        await Runner.run(clerk, "?", hooks=hooks, run_config=RunConfig(call_model_input_filter=hooks.name_request))
        assert server.requests()[0].session == "mine" and server.requests()[0].headers["x-upbeat-agent"] == "clerk"
        await client.close()
