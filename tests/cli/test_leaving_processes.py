"""A launcher whose nodes leave the fleet: what has left is not started again, and a launcher without processes ends."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.core.plan import native_plan, stack_plan
from cli.display import Display
from cli.leave import describe
from cli.supervisor import Run, Supervisor
from contracts.v1.scheduler_pb2 import LeaveNodeReply
from runtime.config_file import load_config

#: A service that notes its start, and ends with the status in STATUS-NAME once that is there.
_SERVICE = """#!/bin/sh
name=$(basename "$0")-$4
trap 'exit 0' TERM
echo x >> "{folder}/starts-$name"
while [ ! -f "{folder}/status-$name" ]; do sleep 0.05; done
exit "$(cat "{folder}/status-$name")"
"""


class Nodes:
    """A launcher of nodes whose processes end as the test says."""

    def __init__(self, folder: Path, nodes: int, only: int | None) -> None:
        self.folder, programs = folder, folder / "bin"
        programs.mkdir()
        for name in ("upbeat-kvstore", "upbeat-worker", "upbeat-scheduler", "upbeat-gateway"):
            (programs / name).write_text(_SERVICE.format(folder=folder))
            (programs / name).chmod(0o755)
        over = {"data": str(folder / "data"), "run_dir": str(folder / "run"), "nodes": {"count": nodes}}
        config = load_config(None, over)
        (folder / "run").mkdir()
        plan = stack_plan(nodes) if only is None else native_plan(only, 1)
        self.supervisor = Supervisor(
            config, programs, Display(as_json=True), (), Run(plan, _never, lambda took_s: None)
        )

    def starts(self, name: str) -> int:
        file = self.folder / f"starts-{name}"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def end(self, name: str, status: int) -> None:
        part = self.folder / "part"
        part.write_text(str(status))
        os.replace(part, self.folder / f"status-{name}")


async def _never() -> tuple[int, str]:
    await asyncio.sleep(0.05)
    return 503, ""


async def _until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - other processes' state
            await asyncio.sleep(0.02)


async def test_a_launcher_ends_when_its_only_node_has_left(tmp_path: Path) -> None:
    made = Nodes(tmp_path, 3, 2)
    running = asyncio.create_task(made.supervisor.run())
    await _until(lambda: made.starts("upbeat-kvstore-2") and made.starts("upbeat-worker-2"))
    made.end("upbeat-worker-2", 76)
    made.end("upbeat-kvstore-2", 76)
    assert await asyncio.wait_for(running, 60) == 0
    assert made.starts("upbeat-worker-2") == made.starts("upbeat-kvstore-2") == 1


async def test_a_worker_that_died_before_its_store_left_is_not_started_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Nodes(tmp_path, 3, 2)
    running = asyncio.create_task(made.supervisor.run())
    await _until(lambda: made.starts("upbeat-kvstore-2") and made.starts("upbeat-worker-2"))
    made.end("upbeat-kvstore-2", 76)  # its worker is told to end
    assert await asyncio.wait_for(running, 60) == 0
    assert made.starts("upbeat-worker-2") == 1 and "worker-2 has ended, as its node leaves" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("reply", "line"),
    [
        (LeaveNodeReply(state="left"), "node-2 has left"),
        (LeaveNodeReply(state="draining", requests=1), "node-2 finishes 1 request"),
        (LeaveNodeReply(state="draining", requests=3), "node-2 finishes 3 requests"),
        (LeaveNodeReply(state="writing"), "node-2 writes back"),
        (
            LeaveNodeReply(state="writing", waits_for="the blob tier", pending_bytes=3 << 20),
            "node-2 writes back, and waits for the blob tier (3.0 MiB to write)",
        ),
    ],
)
def test_how_far_a_node_is(reply: LeaveNodeReply, line: str) -> None:
    assert describe("node-2", reply) == line
