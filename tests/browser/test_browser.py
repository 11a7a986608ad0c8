"""The web SDK in a real Chromium (`scenarios.mjs`): what leaves a page, when, and what never does.

One browser runs all scenarios, one after the other; each is a test here. A gateway with toy insides takes the hints of
one of them.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from browser_needs import ROOT, chromium, need

sys.path.append(str(ROOT / "tests" / "gateway"))
from gateway_fakes import stack, until

HERE = Path(__file__).parent
SCENARIOS = re.findall(r'^scenario\("([^"]+)"', (HERE / "scenarios.mjs").read_text(), re.MULTILINE)
KEYS = [{"key": "key-of-acme", "tenant": "acme"}]


@pytest.fixture(scope="module")
async def outcomes() -> dict[str, str | None]:
    """What went wrong in each scenario, by name; None: nothing."""
    node, program = need(shutil.which("node"), "node"), chromium()
    need((ROOT / "web-sdk" / "node_modules" / "playwright-core").exists(), "web-sdk/node_modules (`make web`)")
    async with stack(1, wait=False, api_keys=KEYS) as s:
        wanted = {"session_id": "real-1"}
        status, made, _ = await s.post("/v1/client_secrets", wanted, headers={"Authorization": "Bearer key-of-acme"})
        assert status == 200
        sri: dict[str, Any] = json.loads((ROOT / "web-sdk" / "dist" / "sri.json").read_text())
        real = {"url": s.url, "token": made["value"], "integrity": sri["upbeat.js"]["integrity"]}
        environment = os.environ | {"CHROMIUM": program, "REAL": json.dumps(real)}
        process = await asyncio.create_subprocess_exec(
            node,
            HERE / "scenarios.mjs",
            env=environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(200):
                out, err = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        assert process.returncode == 0, err.decode()
        await until(lambda: len(s.scheduler.invalidated) == 1)
        told = [(a.session.tenant, a.session.session_id, a.ttl_s) for a in s.scheduler.advised]
        assert told == [("acme", "real-1", 6)], (
            "the scheduler was told of the session that the token is for, and of no other"
        )
        assert s.scheduler.invalidated[0].session.session_id == "real-1"
    said = [json.loads(line) for line in out.decode().splitlines()]
    return {one["name"]: one["error"] for one in said}


@pytest.mark.parametrize("name", SCENARIOS)
def test_in_a_browser(outcomes: dict[str, str | None], name: str) -> None:
    assert outcomes[name] is None, outcomes[name]


async def test_on_a_server_that_renders_pages_it_does_nothing() -> None:
    node = need(shutil.which("node"), "node")
    script = (
        "import { attach, bind } from 'upbeat-web'; const h = attach('#p', { session: 'a' }); h.advise(); "
        "bind('a', 'b'); h.detach();"
        "await new Promise((r) => setTimeout(r, 50)); console.log('went on');"
    )
    process = await asyncio.create_subprocess_exec(
        node,
        "--input-type=module",
        "-e",
        script,
        cwd=ROOT / "web-sdk",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert (out.decode(), err.decode()) == ("went on\n", "")
