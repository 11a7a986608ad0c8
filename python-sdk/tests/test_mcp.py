"""`upbeat-mcp` with the official MCP client, in process, over stdio and over streamable HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mcp import Client
from mcp.client.stdio import StdioServerParameters
from scripted_server import ScriptedServer, serving

from upbeat.mcp import Gateway, main, server_of

SOURCES = str(Path(__file__).parents[1] / "src")
COMMAND = [sys.executable, "-m", "upbeat.mcp"]


def environment(server: ScriptedServer) -> dict[str, str]:
    return {"PYTHONPATH": SOURCES, "UPBEAT_BASE_URL": f"{server.url}/v1", "UPBEAT_API_KEY": "key-1"}


def text_of(result: Any) -> str:
    return "".join(part.text for part in result.content)


async def test_the_tools_have_schemas_that_say_what_they_take() -> None:
    with serving() as server:
        async with Client(server_of(Gateway(server.url))) as client:
            tools = {tool.name: tool for tool in (await client.list_tools()).tools}
    assert set(tools) == {"advise", "invalidate", "placement"}
    schema = tools["advise"].input_schema
    assert schema["required"] == ["session_id"]
    assert set(schema["properties"]) == {"session_id", "expected_arrival_s", "model_id", "priority", "ttl_s"}
    assert all(field.get("description") for field in schema["properties"].values())
    assert tools["placement"].annotations is not None and tools["placement"].annotations.read_only_hint


async def test_hints_reach_the_gateway_over_stdio() -> None:
    with serving() as server:
        started = StdioServerParameters(command=COMMAND[0], args=COMMAND[1:], env=environment(server))
        async with Client(started) as client:
            assert "KV cache" in (client.instructions or "")
            given = {"session_id": "job7:qa", "expected_arrival_s": 4.5, "model_id": "m", "priority": -3, "ttl_s": 9}
            advised = await client.call_tool("advise", given)
            withdrawn = await client.call_tool("invalidate", {"session_id": "job7:qa"})
        assert not advised.is_error and advised.structured_content == {"status": "accepted"}
        assert not withdrawn.is_error
        assert server.order() == [("advise", "job7:qa"), ("invalidate", "job7:qa")]
        body = {"session_id": "job7:qa", "expected_arrival": 4.5, "model_id": "m", "priority": -3, "ttl_s": 9}
        assert server.events[0].body == body and server.events[0].headers["authorization"] == "Bearer key-1"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "session_id"),
        ({"session_id": "two words"}, "session_id"),
        ({"session_id": ".."}, "session_id"),
        ({"session_id": "s", "expected_arrival_s": -1}, "expected_arrival_s"),
        ({"session_id": "s", "priority": 1001}, "priority"),
        ({"session_id": "s", "ttl_s": "long"}, "ttl_s"),
        ({"session_id": "s", "model_id": "a\nb"}, "model_id"),
    ],
    ids=str,
)
async def test_a_wrong_argument_is_named_and_nothing_is_sent(given: dict[str, Any], named: str) -> None:
    with serving() as server:
        async with Client(server_of(Gateway(server.url))) as client:
            result = await client.call_tool("advise", given)
        assert result.is_error and named in text_of(result) and not server.posts


async def test_a_session_id_cannot_leave_its_place_in_the_route() -> None:
    with serving() as server:
        async with Client(server_of(Gateway(server.url))) as client:
            for bad in ("..", "../models", "a/b", "a?b", "a b"):
                result = await client.call_tool("placement", {"session_id": bad})
                assert result.is_error and "session_id" in text_of(result)


async def test_a_refusal_has_the_gateways_own_words() -> None:
    with serving() as server:
        server.refuse = lambda: (429, {"Retry-After": "1"})
        async with Client(server_of(Gateway(server.url))) as client:
            refused = await client.call_tool("advise", {"session_id": "s"})
            assert refused.is_error and "429: as the test wants it" in text_of(refused)
    async with Client(server_of(Gateway(server.url, "secret-key", 0.5))) as client:
        gone = await client.call_tool("advise", {"session_id": "s"})
    assert gone.is_error and server.url in text_of(gone) and "secret-key" not in text_of(gone)


async def test_a_redirect_is_not_followed() -> None:
    with serving() as other, serving() as server:
        server.refuse = lambda: (307, {"Location": f"{other.url}/v1/advisory"})
        async with Client(server_of(Gateway(server.url, "key-1"))) as client:
            assert (await client.call_tool("advise", {"session_id": "s"})).is_error
        assert not other.posts


async def test_streamable_http_serves_this_machine() -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    with serving() as server:
        process = await asyncio.create_subprocess_exec(
            *COMMAND, "--http", "--port", str(port), env=os.environ | environment(server), stderr=subprocess.DEVNULL
        )
        try:
            async with asyncio.timeout(60):
                while True:
                    with contextlib.suppress(OSError):
                        (await asyncio.open_connection("127.0.0.1", port))[1].close()
                        break
                    assert process.returncode is None
                    await asyncio.sleep(0.1)
                async with Client(f"http://127.0.0.1:{port}/mcp") as client:
                    assert not (await client.call_tool("advise", {"session_id": "over-http"})).is_error
        finally:
            process.terminate()
            await process.wait()
        assert server.order() == [("advise", "over-http")]


def test_without_an_address_it_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("UPBEAT_BASE_URL", raising=False)
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2 and "UPBEAT_BASE_URL" in capsys.readouterr().err
