"""The recipes of docs/frameworks.md, run as they stand there against a whole stack: the scheduler has placed the turn
of the session that the recipe names, and a hint for it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtest.stack import Stack

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "demo"
KEY = "key-of-the-first"
CLIENTS, PROXY = (ROOT / ".cache" / name / "bin" / "python" for name in ("clients", "proxy"))
DOCUMENT = (ROOT / "docs" / "frameworks.md").read_text()
RECIPES = dict(re.findall(r"^```\w+ file=(\S+)\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL))
SOURCES = (ROOT / "python-sdk" / "src", ROOT / "integrations" / "langchain-upbeat")
pytestmark = [pytest.mark.stack, pytest.mark.timeout(280)]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    settings = {"gateway": {"api_keys": [{"key": KEY, "tenant": "a"}]}}
    where = tmp_path_factory.mktemp("stack")
    with Stack(model=MODEL, nodes=1, directory=where, hbm_gib=0.25, dram_gib=0.25, settings=settings) as stack:
        yield stack.url


def needed(python: Path, target: str) -> Path:
    if not python.exists():
        assert "UPBEAT_TEST_CLIENTS" not in os.environ, f"UPBEAT_TEST_CLIENTS wants these tests to run: make {target}"
        pytest.skip(f"the frameworks are not there; `make {target}` installs them")
    return python


def environment(url: str) -> dict[str, str]:
    said = {"UPBEAT_BASE_URL": f"{url}/v1", "UPBEAT_API_KEY": KEY, "PYTHONPATH": os.pathsep.join(map(str, SOURCES))}
    return os.environ | said | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "127.0.0.1"}


def run(url: str, python: Path, folder: Path, script: str, *arguments: str) -> str:
    """What a script prints."""
    (folder / "script.py").write_text(script)
    done = subprocess.run(
        [python, "script.py", *arguments],
        cwd=folder,
        env=environment(url),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def placed(url: str, session: str, what: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
    """The session's decisions, oldest first, once they are so."""
    deadline = time.monotonic() + 30
    decisions: list[dict[str, Any]] = []
    while time.monotonic() < deadline:
        answer = httpx.get(f"{url}/v1/sessions/{session}/placement", headers={"Authorization": f"Bearer {KEY}"})
        decisions = answer.json().get("decisions", [])[::-1]
        if what(decisions):
            return decisions
        time.sleep(0.1)
    raise AssertionError(f"{session}: {[(d['what'], d.get('hinted')) for d in decisions]}")


def turned(decisions: list[dict[str, Any]]) -> bool:
    return any(d["what"] == "turn" for d in decisions)


def hinted_and_turned(decisions: list[dict[str, Any]]) -> bool:
    """A hint came, and the turn after it."""
    whats = [d["what"] for d in decisions]
    return "hint" in whats and "turn" in whats[whats.index("hint") :]


def test_litellm_as_a_library(url: str, tmp_path: Path) -> None:
    text = run(url, needed(CLIENTS, "clients"), tmp_path, RECIPES["litellm_library.py"])
    assert "K4417" in text
    placed(url, "chat-litellm", turned)


AFTER_TOOLS = """
import os, time
import litellm
from upbeat.litellm import UpbeatCallback
callback = UpbeatCallback()
litellm.callbacks = [callback]
tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
given = dict(model="openai/upbeat-demo", api_base=os.environ["UPBEAT_BASE_URL"], api_key=os.environ["UPBEAT_API_KEY"])
given |= dict(messages=[{"role": "user", "content": "Look."}], tools=[tool], max_tokens=200)
given |= dict(litellm_session_id="tools-1")
answer = litellm.completion(**given, tool_choice="required")
assert answer.choices[0].message.tool_calls
deadline = time.monotonic() + 30
while callback.client.counters.sent < 1 and time.monotonic() < deadline:
    time.sleep(0.02)
assert callback.client.counters.sent == 1
litellm.completion(**given, tool_choice="none")
"""


def test_litellm_hints_a_session_whose_answer_calls_tools(url: str, tmp_path: Path) -> None:
    run(url, needed(CLIENTS, "clients"), tmp_path, AFTER_TOOLS)
    placed(url, "tools-1", hinted_and_turned)


def until_hinted(recipe: str, client: str) -> str:
    """A recipe's retriever finds its few lines at once, and the turn may overtake the hint: here it takes until the
    hint is sent."""
    line = next(found for found in recipe.splitlines(keepends=True) if found.lstrip().startswith("def _"))
    wait = f"""\
        import time
        deadline = time.monotonic() + 30
        while {client}.counters.sent < 1 and time.monotonic() < deadline:
            time.sleep(0.02)
"""
    return recipe.replace(line, line + wait)


def test_langchain(url: str, tmp_path: Path) -> None:
    script = until_hinted(RECIPES["langchain_chain.py"], "chat.returns.client")
    text = run(url, needed(CLIENTS, "clients"), tmp_path, script)
    assert "K4417" in text
    placed(url, "chat-langchain", hinted_and_turned)


MCP_HOST = """
import asyncio, json, os, sys
from mcp import Client
from mcp.client.stdio import StdioServerParameters

async def main(config):
    said = json.loads(config)["mcpServers"]["upbeat"]
    assert (said["command"], said["args"][0], list(said["env"])) == ("upbeat-mcp", "--base-url", ["UPBEAT_API_KEY"])
    args = ["-m", "upbeat.mcp", "--base-url", os.environ["UPBEAT_BASE_URL"]]
    env = {name: os.environ[name] for name in ("UPBEAT_API_KEY", "PYTHONPATH")}
    async with Client(StdioServerParameters(command=sys.executable, args=args, env=env)) as client:
        advised = await client.call_tool("advise", {"session_id": "chat-mcp", "expected_arrival_s": 1})
        assert not advised.is_error and advised.structured_content["status"] == "accepted", advised
        for _ in range(100):
            placed = await client.call_tool("placement", {"session_id": "chat-mcp"})
            if not placed.is_error:
                break
            assert "placement_not_found" in str(placed) or "404" in str(placed), placed
            await asyncio.sleep(0.1)
        withdrawn = await client.call_tool("invalidate", {"session_id": "chat-mcp"})
        assert not withdrawn.is_error
        print(json.dumps(placed.structured_content))

asyncio.run(main(sys.argv[1]))
"""


def test_an_mcp_host_over_stdio(url: str, tmp_path: Path) -> None:
    text = run(url, needed(CLIENTS, "clients"), tmp_path, MCP_HOST, RECIPES["mcp.json"])
    assert {decision["what"] for decision in json.loads(text)["decisions"]} == {"hint"}


OPEN_WEBUI = """
import asyncio, os, sys, types, httpx

async def main(source):
    module = types.ModuleType("function_upbeat")
    exec(source, module.__dict__)
    function = module.Filter()
    metadata = {"chat_id": "chat-open-webui"}
    asked = "The code of the garage is K4417. What is the code of the garage?"
    body = {"model": "upbeat-demo", "stream": True, "messages": [{"role": "user", "content": asked}], "temperature": 0}
    body = await function.inlet(body, __metadata__=metadata)
    await asyncio.gather(*function._sending)  # knowledge and web search work here
    headers = {"Authorization": "Bearer " + os.environ["UPBEAT_API_KEY"]}
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.post(os.environ["UPBEAT_BASE_URL"] + "/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200 and answer.headers["X-Session-Id"] == "chat-open-webui", answer.text

asyncio.run(main(open(sys.argv[1]).read()))
"""


def test_open_webuis_function(url: str, tmp_path: Path) -> None:
    source = ROOT / "integrations" / "open-webui" / "upbeat_filter.py"
    run(url, needed(CLIENTS, "clients"), tmp_path, OPEN_WEBUI, str(source))
    placed(url, "chat-open-webui", hinted_and_turned)


@pytest.mark.slow
@pytest.mark.sample
def test_llama_index(url: str, tmp_path: Path) -> None:
    text = run(url, needed(PROXY, "proxy"), tmp_path, until_hinted(RECIPES["llama_index_query.py"], "client"))
    assert "K4417" in text
    placed(url, "chat-llama-index", hinted_and_turned)


@pytest.mark.slow
@pytest.mark.sample
def test_litellms_proxy(url: str, tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """The header of the proxy's client names the session at the gateway, and the proxy hinted it."""
    (tmp_path / "config.yaml").write_text(RECIPES["config.yaml"])
    port, program = free_ports(1), needed(PROXY, "proxy").with_name("litellm")
    command = [program, "--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port)]
    master = "sk-of-the-proxy-0123456789abcdef0123456789abcdef"
    with (tmp_path / "log").open("w") as log:
        said = environment(url) | {"LITELLM_MASTER_KEY": master}
        process = subprocess.Popen(command, cwd=tmp_path, env=said, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 180
        asked = {"role": "user", "content": "The code of the garage is K4417. What is the code of the garage?"}
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{port}/health/liveliness")
                break
            except httpx.TransportError:
                assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
                time.sleep(0.2)
        answer = httpx.post(
            f"http://127.0.0.1:{port}/v1/chat/completions",
            json={"model": "upbeat-demo", "messages": [asked], "temperature": 0, "max_tokens": 24},
            headers={"X-OpenWebUI-Chat-Id": "chat-proxy", "Authorization": f"Bearer {master}"},
            timeout=90,
        )
        assert answer.status_code == 200 and "K4417" in answer.text, (tmp_path / "log").read_text()
        placed(url, "chat-proxy", lambda found: {d["what"] for d in found} >= {"hint", "turn"})
    finally:
        process.terminate()
        process.wait(30)
