"""`upbeat join` with real processes: a server that runs already, its store and its sidecar, and a scheduler."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from contracts.v1 import scheduler_pb2
from loadtest.stack import members
from runtime.config_file import cluster_secret, load_config
from storelink.arena_sharing import arenas_of, remove_dead
from tests.runtime.test_reporter import Listener
from tests.sidecar.fake_vllm import KEY, FakeVllm, serving

LIMIT_S = 60.0


class Joined:
    """One `upbeat join`, and what it printed."""

    def __init__(self, folder: Path, port: int, url: str) -> None:
        self.folder, self.port = folder, port
        command = [
            *(str(Path(sys.executable).with_name("upbeat")), "join", "--vllm", url, "--node", "2"),
            *("--scheduler", f"127.0.0.1:{port + 1}", "--port", str(port), "--data", str(folder / "data")),
            *("--run-dir", str(folder / "run"), "--api-key-env", "THEIR_KEY", "--dram-gib", "0.05"),
        ]
        with (folder / "output").open("ab") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=output, cwd=folder, env=os.environ | {"THEIR_KEY": KEY},
                start_new_session=True,
            )  # fmt: skip

    @property
    def said(self) -> str:
        return (self.folder / "output").read_text()

    async def until(self, true: Callable[[], Any]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not true():
                assert self.process.poll() is None, self.said
                await asyncio.sleep(0.05)

    async def ended(self) -> int:
        return await asyncio.wait_for(asyncio.to_thread(self.process.wait), LIMIT_S)


@asynccontextmanager
async def joined(folder: Path, port: int, **server: Any) -> AsyncIterator[tuple[Joined, FakeVllm, Listener]]:
    """A node that has joined a fleet of a scheduler that listens."""
    cluster_secret(folder / "data")
    listener = Listener(f"127.0.0.1:{port + 1}")
    await listener.start()
    async with serving(port + 2, **server) as fake:
        made = Joined(folder, port, f"http://127.0.0.1:{port + 2}")
        try:
            yield made, fake, listener
        finally:
            if made.process.poll() is None:
                os.killpg(made.process.pid, signal.SIGKILL)
            made.process.wait()
            async with asyncio.timeout(LIMIT_S):
                while members(made.process.pid):  # noqa: ASYNC110 - a killed store outlives its launcher
                    await asyncio.sleep(0.02)
            await listener.stop()
            config = load_config(None, {"data": str(folder / "data")})
            remove_dead(arenas_of(config.node(2).arena_stem))
            assert not arenas_of(config.node(2).arena_stem)


async def test_a_server_that_runs_already_becomes_a_node(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    async with joined(tmp_path, free_ports(70)) as (made, fake, listener):
        await made.until(lambda: "node-2 serves m from" in made.said and listener.loads)
        (hello,) = listener.hellos
        assert hello.node == "node-2" and hello.models[0].wire == scheduler_pb2.MODEL_WIRE_HTTP
        assert "warning" not in made.said.split("node-2 serves")[1]
        await fake.die()
        await made.until(lambda: listener.loads[-1].models[0].state == scheduler_pb2.MODEL_STATE_LOADING)
        os.killpg(made.process.pid, signal.SIGINT)
        assert await made.ended() == 0 and "stopped in" in made.said


async def test_a_server_without_the_connector_joins_with_a_clear_word(
    tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    async with joined(tmp_path, free_ports(70), connector=False) as (made, _, listener):
        await made.until(lambda: "node-2 serves m from" in made.said and listener.loads)
        await made.until(lambda: "no connector" in made.said)
        assert "upbeat vllm-config --node 2" in made.said


async def test_the_flags_that_are_printed_name_the_socket_on_which_the_joined_sidecar_hears(
    tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    program = str(Path(sys.executable).with_name("upbeat"))
    done = await asyncio.to_thread(
        subprocess.run,
        [program, "vllm-config", "--nodes", "3", "--node", "2", "--run-dir", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert "--block-size 64" in done.stdout and "--scheduling-policy priority" in done.stdout
    wake = tmp_path / "run" / "vllm-2" / "wake.sock"
    assert str(wake) in done.stdout
    async with joined(tmp_path, free_ports(70)) as (made, _, listener):
        await made.until(lambda: listener.loads)
        assert wake.is_socket()


@pytest.mark.parametrize("taken", ["the node", "the port"])
async def test_a_node_that_is_there_already_is_refused(
    tmp_path: Path, free_ports: Callable[[int], int], taken: str
) -> None:
    async with joined(tmp_path, port := free_ports(70)) as (made, _, listener):
        await made.until(lambda: listener.loads)
        other = tmp_path / "other"
        other.mkdir()
        (other / "data").symlink_to(tmp_path / "data")
        if taken == "the node":
            (other / "run").symlink_to(tmp_path / "run")
        again = Joined(other, port, f"http://127.0.0.1:{port + 2}")
        assert await again.ended() == 2
        assert ("--run-dir" if taken == "the node" else f"--port {port}") in again.said
