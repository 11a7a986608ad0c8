"""The event handler in the real LlamaIndex: hints while a retriever or a tool works."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("llama_index.core")

import httpx
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.response.schema import Response
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.llms.openai_like import OpenAILike
from scripted_server import Reply, ScriptedServer, serving

import upbeat
from upbeat.llama_index import UpbeatEventHandler


@pytest.fixture(autouse=True)
def no_handlers_stay() -> Iterator[None]:
    before = list(get_dispatcher().event_handlers)
    yield
    get_dispatcher().event_handlers = before


def model(server: ScriptedServer) -> OpenAILike:
    return OpenAILike(
        model="m", api_base=f"{server.url}/v1", api_key="none", is_chat_model=True, is_function_calling_model=True,
        max_retries=0, http_client=httpx.Client(event_hooks=upbeat.event_hooks()),
        async_http_client=httpx.AsyncClient(event_hooks=upbeat.async_event_hooks()),
    )  # fmt: skip


class Shelf(BaseRetriever):
    def __init__(self, server: ScriptedServer, fails: bool = False) -> None:
        super().__init__()
        self.server, self.fails = server, fails

    def _retrieve(self, query_bundle: Any) -> list[NodeWithScore]:
        assert self.server.wait_hint("chat-7", 2), "hinted before the retrieval ends"
        if self.fails:
            raise RuntimeError("no shelf")
        return [NodeWithScore(node=TextNode(text="It ticks."), score=1.0)]


def engine(server: ScriptedServer, fails: bool = False) -> RetrieverQueryEngine:
    written = get_response_synthesizer(llm=model(server), callback_manager=None)
    return RetrieverQueryEngine(retriever=Shelf(server, fails), response_synthesizer=written)


def test_a_retriever_hints_its_session_and_the_request_names_it() -> None:
    with serving(Reply("A clock.")) as server, upbeat.AdvisoryClient(server.url) as client:
        UpbeatEventHandler(client).install()
        with client.session("chat-7"):
            answer = engine(server).query("What does it do?")
        assert isinstance(answer, Response) and answer.response == "A clock."
        assert server.order() == [("advise", "chat-7"), ("advise", "chat-7"), ("request", "chat-7")]


def test_a_retriever_that_fails_withdraws_the_hint() -> None:
    with serving() as server, upbeat.AdvisoryClient(server.url) as client:
        UpbeatEventHandler(client).install()
        with pytest.raises(RuntimeError, match="no shelf"), client.session("chat-7"):
            engine(server, fails=True).query("What does it do?")
        assert client.flush() and server.order()[-1] == ("invalidate", "chat-7")


@pytest.mark.parametrize("streaming", [False, True])
def test_a_tool_of_an_agent_hints_its_session_while_it_works(streaming: bool) -> None:
    with serving(Reply(calls=(("look", {"place": "shelf"}),)), Reply("A clock.")) as server:
        seen: list[bool] = []

        async def look(place: str) -> str:
            """Look at a place."""
            seen.append(await asyncio.to_thread(server.wait_hint, "job-1", 2))
            return "It ticks."

        async def work() -> str:
            client = upbeat.AsyncAdvisoryClient(server.url)
            UpbeatEventHandler(client).install()
            agent = FunctionAgent(tools=[look], llm=model(server), streaming=streaming)
            async with client.session("job-1"):
                answer = str(await agent.run("What is on the shelf?"))
            await client.close()
            return answer

        assert asyncio.run(work()) == "A clock." and seen == [True]
        requests = [at for at, e in enumerate(server.order()) if e == ("request", "job-1")]
        hints = [at for at, e in enumerate(server.order()) if e == ("advise", "job-1")]
        assert len(requests) == 2 and any(requests[0] < at < requests[1] for at in hints)


def test_without_a_session_nothing_is_hinted() -> None:
    with serving(Reply("A clock.")) as server, upbeat.AdvisoryClient(server.url) as client:
        UpbeatEventHandler(client).install()
        assert model(server).complete("?").text == "A clock."
        assert client.flush() and not server.posts and server.requests()[0].session is None
