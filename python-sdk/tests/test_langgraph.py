"""The callback handler in the real LangGraph: what may follow a node is hinted while that node runs."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated, Any, TypedDict

import openai
import pytest
from langchain_core.retrievers import BaseRetriever
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.prebuilt import ToolNode, tools_condition
from scripted_server import Reply, ScriptedServer, serving

import upbeat
from upbeat.langgraph import UpbeatCallbackHandler, followers_of


class State(TypedDict):
    messages: Annotated[list[Any], add_messages]


def model(server: ScriptedServer) -> ChatOpenAI:
    return ChatOpenAI(
        model="m",
        base_url=f"{server.url}/v1",
        api_key="none",  # type: ignore[arg-type]
        max_retries=0,
        http_client=openai.DefaultHttpxClient(event_hooks=upbeat.event_hooks()),
        http_async_client=openai.DefaultAsyncHttpxClient(event_hooks=upbeat.async_event_hooks()),
    )


@pytest.fixture
def server_and_plain() -> Any:
    """A server, and a client of the openai package for it."""
    with serving(*[Reply("Yes.")] * 3) as server:
        http = openai.DefaultHttpxClient(event_hooks=upbeat.event_hooks())
        yield server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=http)


def team(server: ScriptedServer) -> Any:
    """writer -> route (asks nobody) -> (critic | editor) -> end."""
    asks = model(server)

    def says(state: State) -> dict[str, Any]:
        return {"messages": [asks.invoke(state["messages"])]}

    async def asays(state: State) -> dict[str, Any]:
        return {"messages": [await asks.ainvoke(state["messages"])]}

    from langchain_core.runnables import RunnableLambda

    made = StateGraph(State)
    for name in ("writer", "critic", "editor"):
        made.add_node(name, RunnableLambda(says, asays))
    made.add_node("route", lambda state: {"messages": []})
    made.add_edge(START, "writer")
    made.add_edge("writer", "route")
    made.add_conditional_edges("route", lambda state: str(state["messages"][-1].content), ["critic", "editor"])
    made.add_edge("critic", END)
    made.add_edge("editor", END)
    return made.compile()


def config(handler: Any, thread: str) -> Any:
    return {"callbacks": [handler], "configurable": {"thread_id": thread}}


def test_the_graph_says_what_may_follow() -> None:
    with serving() as server:
        graph = team(server)
        assert followers_of(graph)["route"] == ("critic", "editor")
        with upbeat.AdvisoryClient(server.url) as client:
            handler = UpbeatCallbackHandler(client, graph, "team", silent=["route"])
            assert handler.may_follow("writer") == ("critic", "editor") and handler.may_follow("critic") == ()


def test_every_branch_is_hinted_while_the_node_before_it_asks() -> None:
    with (
        serving(Reply("editor", after_hint="t1:editor"), Reply("Done.")) as server,
        upbeat.AdvisoryClient(server.url) as client,
    ):
        graph = team(server)
        result = graph.invoke({"messages": ["Go"]}, config(UpbeatCallbackHandler(client, graph, "team"), "t1"))
        assert result["messages"][-1].content == "Done." and client.flush()
        order = server.order()
        assert order.index(("advise", "t1:editor")) < order.index(("request", "t1:editor"))
        assert ("advise", "t1:critic") in order and ("invalidate", "t1:critic") in order
        first, second = server.requests()
        assert [r.headers["x-upbeat-agent"] for r in (first, second)] == ["writer", "editor"]
        assert {r.headers["x-upbeat-workflow"] for r in (first, second)} == {"team"}
        assert {r.headers["x-upbeat-run"] for r in (first, second)} == {"t1"}


def test_a_node_that_asked_nobody_is_not_hinted_again() -> None:
    with serving(*[Reply("editor"), Reply("Done.")] * 2) as server, upbeat.AdvisoryClient(server.url) as client:
        graph = team(server)
        handler = UpbeatCallbackHandler(client, graph, "team")
        for thread in ("t1", "t2"):
            graph.invoke({"messages": ["Go"]}, config(handler, thread))
        assert client.flush()
        assert ("advise", "t1:route") in server.order() and ("advise", "t2:route") not in server.order()
        assert ("advise", "t2:editor") in server.order()


async def test_asynchronous_graphs_at_the_same_time_do_not_mix() -> None:
    if sys.version_info < (3, 11):
        pytest.skip("LangGraph passes no context to tasks there")
    with serving(*[Reply("editor")] * 8) as server:
        client = upbeat.AsyncAdvisoryClient(server.url)
        graph = team(server)
        handler = UpbeatCallbackHandler(client, graph, "team")
        await asyncio.gather(*(graph.ainvoke({"messages": [f"I am {i}"]}, config(handler, f"t{i}")) for i in range(4)))
        assert await client.flush()
        asked = {(r.body["messages"][0]["content"], r.session) for r in server.requests()}
        assert asked == {(f"I am {i}", f"t{i}:{agent}") for i in range(4) for agent in ("writer", "editor")}
        await client.close()


def test_a_tool_and_a_retriever_hint_the_node_that_will_be_told() -> None:
    with (
        serving(Reply(calls=(("look_up", {"what": "clock"}),)), Reply("It ticks.")) as server,
        upbeat.AdvisoryClient(server.url) as client,
    ):
        seen: list[bool] = []

        @tool
        def look_up(what: str) -> str:
            """Look something up."""
            seen.append(server.wait_hint("t3:agent", 2))
            return "ticks"

        class Shelf(BaseRetriever):
            def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Any]:
                seen.append(server.wait_hint("t3:agent", 1))
                return []

        asks, shelf = model(server).bind_tools([look_up]), Shelf()
        made = StateGraph(State)
        made.add_node("search", lambda state: {"messages": [str(d) for d in shelf.invoke("clock")]})
        made.add_node("agent", lambda state: {"messages": [asks.invoke(state["messages"])]})
        made.add_node("tools", ToolNode([look_up]))
        made.add_edge(START, "search")
        made.add_edge("search", "agent")
        made.add_conditional_edges("agent", tools_condition)
        made.add_edge("tools", "agent")
        graph = made.compile()
        graph.invoke({"messages": ["What does it do?"]}, config(UpbeatCallbackHandler(client, graph, "team"), "t3"))
        assert seen == [True, True]
        order = [e for e in server.order() if e[1] == "t3:agent"]
        assert order[0][0] == "advise" and order.index(("request", "t3:agent")) < len(order) - 1


def test_without_a_thread_the_run_is_the_graphs_own() -> None:
    with serving(Reply("critic"), Reply("Done.")) as server, upbeat.AdvisoryClient(server.url) as client:
        graph = team(server)
        graph.invoke({"messages": ["Go"]}, {"callbacks": [UpbeatCallbackHandler(client, graph, "team")]})
        assert client.flush()
        runs = {r.headers["x-upbeat-run"] for r in server.requests()}
        assert len(runs) == 1 and ("advise", f"{runs.pop()}:critic") in server.order()


def test_a_node_that_fails_withdraws_what_it_announced() -> None:
    with serving() as server, upbeat.AdvisoryClient(server.url) as client:

        def breaks(state: State) -> dict[str, Any]:
            raise RuntimeError("broken")

        made = StateGraph(State)
        made.add_node("first", breaks)
        made.add_node("second", breaks)
        made.add_edge(START, "first")
        made.add_edge("first", "second")
        graph = made.compile()
        with pytest.raises(RuntimeError, match="broken"):
            graph.invoke({"messages": ["Go"]}, config(UpbeatCallbackHandler(client, graph, "team"), "t4"))
        assert client.flush()
        assert server.order()[-1] == ("invalidate", "t4:second")
        assert upbeat.current_session() is None


def test_a_node_may_ask_by_any_client_and_what_follows_the_graph_is_not_its(server_and_plain: Any) -> None:
    server, plain = server_and_plain
    with upbeat.AdvisoryClient(server.url) as client:

        def ask(state: State) -> dict[str, Any]:
            answer = plain.chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}])
            return {"messages": [answer.choices[0].message.content]}

        made = StateGraph(State)
        made.add_node("first", lambda state: {"messages": []})
        made.add_node("clerk", ask)
        made.add_edge(START, "first")
        made.add_edge("first", "clerk")
        graph = made.compile()
        handler = UpbeatCallbackHandler(client, graph, "team")
        for thread in ("t5", "t6"):
            graph.invoke({"messages": []}, config(handler, thread))
        plain.chat.completions.create(model="m", messages=[{"role": "user", "content": "Mine."}])
        assert [r.session for r in server.requests()] == ["t5:clerk", "t6:clerk", None]
        assert server.wait_hint("t6:clerk"), "known to ask, though LangChain saw nothing of it"
