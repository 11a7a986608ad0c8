"""Runs sets of scenarios of playground.mjs, or of another script that prints a line of JSON for each."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from browser_needs import ROOT, chromium, need

HERE = Path(__file__).parent
PLAYGROUND = "playground.mjs"
LIMIT_S = 240


def named(kind: str, script: str = PLAYGROUND) -> list[str]:
    """The scenarios of a set."""
    return re.findall(rf'^{kind}\("(.*)", async', (HERE / script).read_text(), re.MULTILINE)


async def run(kind: str, url: str, key: str = "", script: str = PLAYGROUND, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """Runs a set, within `limit_s`; the error of each scenario by name, None where it has none."""
    node = need(shutil.which("node"), "node")
    program = chromium()
    need(
        (ROOT / "web-sdk" / "node_modules" / "playwright-core").exists(),
        "web-sdk/node_modules (npm ci --prefix web-sdk)",
    )
    process = await asyncio.create_subprocess_exec(
        node,
        str(HERE / script),
        kind,
        env={**os.environ, "URL": url, "KEY": key, "CHROMIUM": program},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        limit=1 << 20,
    )
    try:
        async with asyncio.timeout(limit_s):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    lines = [json.loads(line) if line.startswith("{") else {"said": line} for line in output.decode().splitlines()]
    found = {line["name"]: line["error"] for line in lines if "name" in line}
    return {name: found.get(name, f"did not run: {output.decode()[-2000:]}") for name in named(kind, script)}
