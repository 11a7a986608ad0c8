"""Agent frameworks and proxies as clients of a gateway: `python frameworks.py URL KEY MODEL`, in an environment of its
own (`make clients`). Prints one JSON object: case -> "ok" or what was wrong."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks a server for prices

import anthropic
import litellm
import openai
from agents import (
    Agent,
    ModelSettings,
    Runner,
    SQLiteSession,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
)
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai.types.responses import ResponseCompletedEvent
from pydantic import BaseModel

URL, KEY, MODEL = sys.argv[1:4]
ASKED = "The code of the garage is K4417. What is the code of the garage?"
litellm.suppress_debug_info = True
set_tracing_disabled(True)


class Thing(BaseModel):
    """What the model is to answer with."""

    colour: str
    count: int


# ---- OpenAI's Agents SDK, with its defaults: the Responses API -------------------------------------------------------
def fresh_client() -> None:
    """A client of this case's event loop."""
    set_default_openai_client(openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0))


def agents_run() -> None:
    agent = Agent(name="a", instructions="Be brief.", model=MODEL)
    result = Runner.run_sync(agent, ASKED)
    assert "K4417" in result.final_output and result.last_response_id is not None


def agents_streams() -> None:
    async def go() -> None:
        result = Runner.run_streamed(Agent(name="a", model=MODEL), ASKED)
        text, ended = "", False
        async for event in result.stream_events():
            if event.type == "raw_response_event":
                text += event.data.delta if event.data.type == "response.output_text.delta" else ""
                ended = ended or isinstance(event.data, ResponseCompletedEvent)
        assert ended and text == result.final_output

    asyncio.run(go())


def agents_tools() -> None:
    seen: list[str] = []

    @function_tool
    def look(place: str) -> str:
        """Look at a place."""
        seen.append(place)
        return "The code of the garage is K4417."

    settings = ModelSettings(tool_choice="required", max_tokens=200, temperature=0)
    agent = Agent(name="a", model=MODEL, tools=[look], model_settings=settings)
    result = Runner.run_sync(agent, "What is the code of the garage?", max_turns=6)
    assert seen and [item.type for item in result.new_items][:2] == ["tool_call_item", "tool_call_output_item"]


def agents_output_type() -> None:
    # At temperature 1 the demo model sometimes never ends a string.
    agent = Agent(name="a", model=MODEL, output_type=Thing, model_settings=ModelSettings(temperature=0))
    assert isinstance(Runner.run_sync(agent, ASKED).final_output, Thing)


def agents_sessions() -> None:
    agent = Agent(name="a", model=MODEL)
    session = SQLiteSession("s")
    Runner.run_sync(agent, ASKED, session=session)
    result = Runner.run_sync(agent, "What is the code of the garage?", session=session)
    assert len(result.to_input_list()) >= 2
    first = Runner.run_sync(agent, ASKED)
    second = Runner.run_sync(agent, "What is the code of the garage?", previous_response_id=first.last_response_id)
    response = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY).responses.retrieve(second.last_response_id or "")
    assert response.previous_response_id == first.last_response_id


# ---- LangChain -------------------------------------------------------------------------------------------------------
def _chat(**more: Any) -> ChatOpenAI:
    given = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": KEY, "use_responses_api": True, "max_retries": 0}
    return ChatOpenAI(**given | {"temperature": 0} | more)


def langchain_invokes() -> None:
    answer = _chat().invoke(ASKED)
    assert "K4417" in answer.text and answer.usage_metadata["total_tokens"] > 0
    assert answer.response_metadata["status"] == "completed"


def langchain_streams() -> None:
    chunks = list(_chat().stream(ASKED))
    assert "K4417" in "".join(chunk.text for chunk in chunks)


def langchain_tools() -> None:
    @tool
    def look(place: str) -> str:
        """Look at a place."""
        return place

    bound = _chat(max_tokens=200).bind_tools([look], tool_choice="look")
    answer = bound.invoke(ASKED)
    assert isinstance(answer, AIMessage) and answer.tool_calls[0]["name"] == "look"
    back = [HumanMessage(ASKED), answer, *(ToolMessage("done", tool_call_id=c["id"]) for c in answer.tool_calls)]
    assert isinstance(_chat(max_tokens=20).invoke(back), AIMessage)


def langchain_structured() -> None:
    assert isinstance(_chat().with_structured_output(Thing).invoke(ASKED), Thing)


def langchain_goes_on() -> None:
    chat = _chat(use_previous_response_id=True)
    first = chat.invoke([HumanMessage(ASKED)])
    second = chat.invoke([HumanMessage(ASKED), first, HumanMessage("What is the code of the garage?")])
    made = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY).responses.retrieve(second.response_metadata["id"])
    assert made.previous_response_id == first.response_metadata["id"]


# ---- LiteLLM as a client ---------------------------------------------------------------------------------------------
_OPENAI = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": KEY}
_ANTHROPIC = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": KEY}
_TOOL = {"type": "function", "function": {"name": "look", "parameters": {
    "type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}}}  # fmt: skip


def litellm_chats() -> None:
    for where in (_OPENAI, _ANTHROPIC):
        given: Any = where | {"messages": [{"role": "user", "content": ASKED}], "max_tokens": 24, "temperature": 0}
        whole = litellm.completion(**given).choices[0].message.content
        assert "K4417" in whole
        parts = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**given, stream=True)]
        assert "".join(parts) == whole
        called = litellm.completion(**given | {"max_tokens": 200}, tools=[_TOOL], tool_choice="required")
        assert called.choices[0].message.tool_calls[0].function.name == "look"


def litellm_responses() -> None:
    first = litellm.responses(**_OPENAI, input=ASKED, temperature=0)
    assert "K4417" in first.output[0].content[0].text
    stream = litellm.responses(**_OPENAI, input=ASKED, temperature=0, stream=True)
    kinds = [str(getattr(event, "type", "")).lower() for event in stream]
    assert any("completed" in kind for kind in kinds)


def litellm_errors() -> None:
    try:
        litellm.completion(**_ANTHROPIC | {"model": "anthropic/nobody"}, messages=[{"role": "user", "content": "a"}])
    except litellm.NotFoundError:
        return
    raise AssertionError("it did not fail")


def anthropic_newer() -> None:
    """A newer client of Anthropic's than the one in the gateway's environment."""
    client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
    with client.messages.stream(
        model=MODEL, max_tokens=24, messages=[{"role": "user", "content": ASKED}], extra_body={"temperature": 0}
    ) as stream:
        assert "K4417" in "".join(stream.text_stream)


CASES: dict[str, Callable[[], None]] = {
    case.__name__: case
    for case in (
        agents_run, agents_streams, agents_tools, agents_output_type, agents_sessions, langchain_invokes,
        langchain_streams, langchain_tools, langchain_structured, langchain_goes_on, litellm_chats, litellm_responses,
        litellm_errors, anthropic_newer,
    )
}  # fmt: skip


def main() -> None:
    found = {}
    for name, case in CASES.items():
        fresh_client()
        try:
            case()
            found[name] = "ok"
        except Exception:
            found[name] = traceback.format_exc()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
