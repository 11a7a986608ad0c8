"""ChatUpbeat names sessions and hints them, against a scripted server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import upbeat
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_core.tools import tool
from scripted_server import Reply, ScriptedServer, serving

from langchain_upbeat import ChatUpbeat, SessionHints

CALLS = Reply(calls=(("look", {"place": "shelf"}),))


@pytest.fixture
def hint_client(server: ScriptedServer) -> Iterator[upbeat.AdvisoryClient]:
    with upbeat.AdvisoryClient(server.url) as client:
        yield client


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with serving() as made:
        yield made


def chat(server: ScriptedServer, *replies: Reply, **more: Any) -> ChatUpbeat:
    server.replies += replies
    return ChatUpbeat(model="m", base_url=f"{server.url}/v1", max_retries=0, **more)


@tool
def look(place: str) -> str:
    """Look at a place."""
    return "A clock."


def test_every_way_of_calling_names_the_session(server: ScriptedServer) -> None:
    model = chat(server, *[Reply("Yes.")] * 9)
    config: Any = {"configurable": {"session_id": "configured"}}

    async def asynchronous() -> None:
        await model.ainvoke("?", session_id="a")
        [chunk async for chunk in model.astream("?", config)]

    model.invoke("?", session_id="b")
    model.invoke("?", config)
    list(model.stream("?", session_id="c"))
    list(model.stream("?", config))
    asyncio.run(asynchronous())
    model.bind(session_id="d").invoke("?")
    model.batch(["?"], config)
    model.invoke("?")
    assert [r.session for r in server.requests()] == [
        "b", "configured", "c", "configured", "a", "configured", "d", "configured", None,
    ]  # fmt: skip
    assert not any("session_id" in r.body or "extra_headers" in r.body for r in server.requests())


def test_what_is_nearer_to_the_call_names_the_session(server: ScriptedServer) -> None:
    model = chat(server, *[Reply("Yes.")] * 6, session_id="mine")
    thread: Any = {"configurable": {"thread_id": "thread 1"}}
    model.invoke("?", thread)
    model.invoke("?", thread, session_id="argument")
    model.invoke("?", session_id="argument", extra_headers={"x-session-id": "header"})
    free = model.model_copy(update={"session_id": None})
    free.invoke("?", thread)
    hop = upbeat.Hop("team", "writer", "job7")
    with upbeat.speaking_as(hop):
        free.invoke("?", thread)
    RunnableLambda(lambda text: free.invoke(text)).invoke("?", {"configurable": {"session_id": "of-the-chain"}})
    assert [r.session for r in server.requests()] == [
        "mine", "argument", "header", "thread-1", "job7:writer", "of-the-chain",
    ]  # fmt: skip
    assert server.requests()[4].headers["x-upbeat-agent"] == "writer"


@pytest.mark.parametrize("way", ["invoke", "stream", "ainvoke", "astream"])
def test_an_answer_that_calls_tools_hints_the_session(server: ScriptedServer, way: str) -> None:
    model = chat(server, CALLS, Reply("A clock.", after_hint="s1")).bind_tools([look])

    async def asynchronous() -> None:
        if way == "ainvoke":
            await model.ainvoke("?", session_id="s1")
        else:
            [chunk async for chunk in model.astream("?", session_id="s1")]

    if way.startswith("a"):
        asyncio.run(asynchronous())
    elif way == "invoke":
        assert model.invoke("?", session_id="s1").tool_calls
    else:
        list(model.stream("?", session_id="s1"))
    assert server.wait_hint("s1")
    model.invoke("?", session_id="s1")
    assert server.order() == [("request", "s1"), ("advise", "s1"), ("request", "s1")]


def test_without_tools_or_with_hints_off_nothing_is_hinted(
    server: ScriptedServer, hint_client: upbeat.AdvisoryClient
) -> None:
    chat(server, Reply("Yes."), hint_client=hint_client).invoke("?", session_id="s")
    chat(server, CALLS, hint_client=hint_client, hints=False).bind_tools([look]).invoke("?", session_id="s")
    assert hint_client.flush() and not server.posts


class Shelf(BaseRetriever):
    server: Any
    fails: bool = False

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Any]:
        assert self.server.wait_hint("chat-7"), "hinted before the retrieval ends"
        if self.fails:
            raise RuntimeError("no shelf")
        return []


def rag(server: ScriptedServer, model: ChatUpbeat, fails: bool = False) -> Any:
    prompt = ChatPromptTemplate.from_template("{found} {question}")
    return {"found": Shelf(server=server, fails=fails), "question": RunnablePassthrough()} | prompt | model


def test_a_retriever_of_a_chain_hints_its_session(server: ScriptedServer) -> None:
    model = chat(server, Reply("Yes."))
    config: Any = {"callbacks": [SessionHints(model)], "configurable": {"session_id": "chat-7"}}
    assert rag(server, model).invoke("?", config).content == "Yes."
    assert server.order() == [("advise", "chat-7"), ("request", "chat-7")]


def test_a_retriever_that_fails_withdraws_the_hint(server: ScriptedServer, hint_client: upbeat.AdvisoryClient) -> None:
    model = chat(server, hint_client=hint_client)
    config: Any = {"callbacks": [SessionHints(model)], "configurable": {"session_id": "chat-7"}}
    with pytest.raises(RuntimeError, match="no shelf"):
        rag(server, model, fails=True).invoke("?", config)
    assert hint_client.flush() and server.order() == [("advise", "chat-7"), ("invalidate", "chat-7")]


def test_what_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UPBEAT_BASE_URL", raising=False)
    with pytest.raises(ValueError, match="UPBEAT_BASE_URL"):
        ChatUpbeat(model="m")
    with pytest.raises(ValueError, match="hint_client"):
        ChatUpbeat(model="m", base_url="http://127.0.0.1:9/v1", hint_client="me")
