"""A graph of two agents, as its user writes it, against a gateway: `langgraph_client.py BASE_URL MODEL`. Prints the
client's counters.

Run with the environment that has the agent frameworks (`make sdk-venv`).
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Annotated, Any, TypedDict

import openai
import upbeat
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from upbeat.langgraph import UpbeatCallbackHandler


class State(TypedDict):
    messages: Annotated[list[Any], add_messages]


def main(url: str, name: str) -> None:
    http = openai.DefaultHttpxClient(event_hooks=upbeat.event_hooks())
    model = ChatOpenAI(model=name, base_url=url, api_key="none", http_client=http, max_tokens=8, temperature=0)  # type: ignore[arg-type]
    with upbeat.AdvisoryClient(url) as client:

        def ask(state: State, word: str) -> dict[str, Any]:
            answer = model.invoke([*state["messages"], ("user", word)])
            assert client.flush(30), "however busy this machine is, what was hinted meanwhile has left"
            return {"messages": [answer]}

        graph = StateGraph(State)
        graph.add_node("writer", lambda state: ask(state, "Write a line."))
        graph.add_node("critic", lambda state: ask(state, "Judge it."))
        graph.add_edge(START, "writer")
        graph.add_edge("writer", "critic")
        graph.add_edge("critic", END)
        made = graph.compile()
        handler = UpbeatCallbackHandler(client, made, "press")
        made.invoke({"messages": []}, {"callbacks": [handler], "configurable": {"thread_id": "job3"}})
        print(json.dumps(dataclasses.asdict(client.counters)))


if __name__ == "__main__":
    main(*sys.argv[1:])
