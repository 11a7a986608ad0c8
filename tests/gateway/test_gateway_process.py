"""The gateway as the process that `upbeat up` starts."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from gateway_fakes import MODEL, Stack, events, stack, until

from runtime.config import Config, dump_config


async def started(config: Config, folder: Path) -> asyncio.subprocess.Process:
    file = folder / "config.yaml"
    file.write_text(dump_config(config))
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", "--config", str(file), stderr=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2]
    )


@pytest.fixture
async def s() -> Any:
    async with stack() as running:
        yield running


async def test_a_stop_lets_the_running_stream_end_and_exits_cleanly(s: Stack, tmp_path: Path) -> None:
    await s.gateway.stop()  # its port is the process's now
    process = await started(s.config, tmp_path)

    async def serving() -> bool:
        try:
            return await s.is_ready()
        except OSError:
            return False

    await until(serving, 30)
    s.workers[0].token_s = 0.02
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 40}
    async with s.http.post(f"{s.url}/v1/chat/completions", json=body) as r:
        process.terminate()
        chunks = await events(r)
    assert chunks[-1] == "[DONE]" and len(chunks) == 43
    assert await process.wait() == 0


async def test_a_taken_port_stops_the_start_with_one_line(s: Stack, tmp_path: Path) -> None:
    process = await started(s.config, tmp_path)
    _, errors = await process.communicate()
    assert process.returncode == 1
    assert str(s.config.gateway.port).encode() in errors and b"Traceback" not in errors
