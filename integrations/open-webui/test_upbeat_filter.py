"""The function as Open WebUI's loader treats it: its source is executed in a module of its own, the frontmatter read by
lines, valves made by pydantic from what the database has, and each handler called with the parameters it names.

Open WebUI itself is not installed for this: it brings a gigabyte.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_server import ScriptedServer, serving

SOURCE = (Path(__file__).parent / "upbeat_filter.py").read_text()


def loaded() -> Any:
    """As `load_function_module_by_id`, which executes administrators' functions."""
    module = types.ModuleType("function_upbeat")
    sys.modules["function_upbeat"] = module
    exec(SOURCE, module.__dict__)
    assert not hasattr(module, "Pipe") and not hasattr(module, "Action")
    return module.Filter()


async def handled(function: Any, kind: str, data: dict[str, Any], valves: dict[str, Any], **extra: Any) -> Any:
    """As `process_filter_functions`."""
    function.valves = function.Valves(**valves)
    handler = getattr(function, kind)
    takes = inspect.signature(handler).parameters
    given = {"event" if kind == "stream" else "body": data} | {k: v for k, v in extra.items() if k in takes}
    answer = await handler(**given)
    await asyncio.gather(*function._sending)
    return answer


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with serving() as made:
        yield made


def of_chat(chat_id: Any, **more: Any) -> dict[str, Any]:
    """What Open WebUI gives each handler."""
    return {
        "__metadata__": {"chat_id": chat_id, "message_id": "m1", "user_id": "u1", **more},
        "__user__": {"id": "u1"},
        "__id__": "upbeat",
        "__body__": {"model": "upbeat-demo"},
    }


def test_the_frontmatter_is_one_that_open_webui_reads() -> None:
    lines = SOURCE.splitlines()
    assert lines[0] == '"""'
    pattern = re.compile(r"^\s*([a-z_]+):\s*(.*)\s*$", re.IGNORECASE)
    read = dict(found.groups() for line in lines[1 : lines.index('"""', 1)] if (found := pattern.match(line)))
    assert {"title", "version", "required_open_webui_version", "license", "description"} <= set(read)
    assert "requirements" not in read, "nothing is installed into Open WebUI"
    assert not re.search(r"from (utils|apps|main|config)", SOURCE), "Open WebUI replaces these texts"


def test_valves_have_defaults_and_the_key_is_a_password() -> None:
    function = loaded()
    schema = function.Valves.model_json_schema()
    assert all(field.get("description") for field in schema["properties"].values())
    assert schema["properties"]["api_key"]["input"] == {"type": "password"}
    with pytest.raises(ValueError, match="after_answer_s"):
        function.Valves(after_answer_s=-1)


async def test_a_chats_request_names_its_session_and_is_hinted_before_retrieval(server: ScriptedServer) -> None:
    body = {"model": "upbeat-demo", "messages": []}
    valves = {"base_url": f"{server.url}/v1", "api_key": "key-1"}
    body = await handled(loaded(), "inlet", body, valves, **of_chat("4f3c-11"))
    assert body["session_id"] == "4f3c-11" and server.order() == [("advise", "4f3c-11")]
    assert server.events[0].headers["authorization"] == "Bearer key-1"


@pytest.mark.parametrize(
    ("chat_id", "named"),
    [("local:a b", r"chat-[0-9a-f]{32}"), ("..", r"chat-[0-9a-f]{32}"), ("x" * 200, r"chat-[0-9a-f]{32}")],
)
async def test_a_chat_id_that_is_no_session_id_gets_a_legal_one(chat_id: str, named: str) -> None:
    body = await handled(loaded(), "inlet", {"model": "m"}, {"base_url": ""}, **of_chat(chat_id))
    assert re.fullmatch(named, body["session_id"])


@pytest.mark.parametrize(
    "extra", [of_chat(None), of_chat(""), of_chat(7), of_chat("c", task="title_generation"), {}, {"__metadata__": "?"}]
)
async def test_what_is_no_chat_is_left_alone(server: ScriptedServer, extra: dict[str, Any]) -> None:
    body = await handled(loaded(), "inlet", {"model": "m"}, {"base_url": server.url}, **extra)
    assert body == {"model": "m"} and not server.posts


async def test_other_providers_models_are_left_alone(server: ScriptedServer) -> None:
    valves = {"base_url": server.url, "models": "upbeat-demo, other"}
    assert await handled(loaded(), "inlet", {"model": "gpt-6"}, valves, **of_chat("c")) == {"model": "gpt-6"}
    assert (await handled(loaded(), "inlet", {"model": "other"}, valves, **of_chat("c")))["session_id"] == "c"


async def test_an_answer_that_calls_tools_hints_once(server: ScriptedServer) -> None:
    function, valves = loaded(), {"base_url": server.url}
    call = {"id": "a1", "choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}
    for event in ({"id": "a1", "choices": [{"delta": {"content": "x"}}]}, call, call, {"choices": None}, {}):
        assert await handled(function, "stream", event, valves, **of_chat("c")) == event
    assert server.order() == [("advise", "c")]
    await handled(function, "stream", {**call, "id": "a2"}, valves, **of_chat("c"))
    assert server.order() == [("advise", "c")] * 2


async def test_after_an_answer_it_hints_only_if_told_to(server: ScriptedServer) -> None:
    body = {"model": "m", "chat_id": "c", "messages": []}
    await handled(loaded(), "outlet", body, {"base_url": server.url}, **of_chat("c"))
    assert not server.posts
    await handled(loaded(), "outlet", body, {"base_url": server.url, "after_answer_s": 90}, **of_chat("c"))
    assert server.events[0].body == {"session_id": "c", "ttl_s": 90}


async def test_a_gateway_that_is_away_or_refuses_never_reaches_the_chat(server: ScriptedServer) -> None:
    server.refuse = lambda: (401, {})
    for address in (server.url, "http://127.0.0.1:9", "file:///etc/passwd", "no address"):
        body = await handled(loaded(), "inlet", {"model": "m"}, {"base_url": address}, **of_chat("c"))
        assert body["session_id"] == "c"
