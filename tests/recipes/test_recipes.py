"""The recipes of docs/web-sdk.md, run as they stand there: hints reach the scheduler for the very session that the
chat's request names."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import pytest

sys.path.append(str(Path(__file__).parents[1] / "gateway"))
sys.path.append(str(Path(__file__).parents[1] / "browser"))
from browser_needs import chromium, need
from gateway_fakes import MODEL, Stack, stack

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
pytestmark = [pytest.mark.slow, pytest.mark.sample]
KEY = "key-of-acme"
DOCUMENT = (ROOT / "docs" / "web-sdk.md").read_text()


def write_recipe(folder: Path, *suffixes: str) -> None:
    """The document's files of one language, where they say that they belong."""
    for name, text in re.findall(r"^```\w+ file=(\S+)\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL):
        if name.endswith(suffixes):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)


@contextlib.asynccontextmanager
async def serving(s: Stack, port: int, *command: str | Path) -> AsyncIterator[str]:
    """The recipe's server, once it answers."""
    said = {
        "UPBEAT_URL": s.url,
        "UPBEAT_API_KEY": KEY,
        "UPBEAT_MODEL": MODEL,
        "PORT": str(port),
        "GRADIO_ANALYTICS_ENABLED": "False",
    }
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | said
    process = await asyncio.create_subprocess_exec(
        *command, env=environment, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    url = f"http://127.0.0.1:{port}"
    try:
        async with asyncio.timeout(90):
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with s.http.get(url):
                        break
                if process.returncode is not None:
                    assert process.stderr is not None
                    pytest.fail((await process.stderr.read()).decode())
                await asyncio.sleep(0.1)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def visit(s: Stack, url: str, field: str, answer: str) -> None:
    """Type and send a message there, and check what Upbeat saw of it."""
    environment = os.environ | {"CHROMIUM": chromium(), "PAGE": url, "FIELD": field, "ANSWER": answer}
    node = need(shutil.which("node"), "node")
    need((ROOT / "web-sdk" / "node_modules" / "playwright-core").exists(), "web-sdk/node_modules (`make web`)")
    process = await asyncio.create_subprocess_exec(
        node, HERE / "visit.mjs", env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, err.decode()
    seen = json.loads(out)
    assert seen["hints"][0] == "/v1/advisory 202"
    (request,) = s.workers[0].submitted
    assert request.messages is not None and "zebra" in str(request.messages[-1])
    assert {(a.session.tenant, a.session.session_id) for a in s.scheduler.advised} == {
        ("acme", request.session.session_id)
    }


async def test_gradio(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    python = ROOT / ".cache" / "gradio" / "bin" / "python"
    need(python.exists(), ".cache/gradio (`make recipes`)")
    write_recipe(tmp_path, ".py")
    async with (
        stack(1, api_keys=[{"key": KEY, "tenant": "acme"}]) as s,
        serving(s, free_ports(1), python, tmp_path / "chat.py") as url,
    ):
        await visit(s, url, "#prompt textarea", ".bot")


async def test_the_ai_sdk(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    node = need(shutil.which("node"), "node")
    need((HERE / "node_modules" / "ai").exists(), "tests/recipes/node_modules (`make recipes`)")
    write_recipe(tmp_path, ".tsx", ".ts")
    async with (
        stack(1, api_keys=[{"key": KEY, "tenant": "acme"}]) as s,
        serving(s, free_ports(1), node, HERE / "serve_ai_sdk.mjs", tmp_path) as url,
    ):
        await visit(s, url, "input", ".assistant")
