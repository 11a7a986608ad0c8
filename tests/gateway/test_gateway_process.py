"""The gateway as the process that `upbeat up` starts."""

from __future__ import annotations

import asyncio
import re
import sys
from asyncio.subprocess import DEVNULL, PIPE
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from gateway_fakes import MODEL, Stack, events, stack, until

from contracts.cluster import secret_id
from contracts.exits import WRONG_USAGE
from contracts.v1 import scheduler_pb2_grpc
from runtime import rpc, same_secret
from runtime.config import Config
from runtime.config_file import changed, cluster_secret, dump_config, load_config
from tests.ports import free_ports


async def started(config: Config, folder: Path, number: int = 0, log: int = PIPE) -> asyncio.subprocess.Process:
    file = folder / "config.yaml"
    file.write_text(dump_config(config))
    command = [sys.executable, "-m", "gateway", "--config", str(file), "--number", str(number)]
    return await asyncio.create_subprocess_exec(*command, stderr=log, cwd=Path(__file__).parents[2])


async def ended(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.communicate()


@pytest.fixture
async def s() -> Any:
    async with stack() as running:
        yield running


async def serving(s: Stack) -> bool:
    try:
        return await s.is_ready()
    except OSError:
        return False


async def test_a_stop_lets_the_running_stream_end_and_exits_cleanly(s: Stack, tmp_path: Path) -> None:
    await s.gateway.stop()  # its port is the process's now
    process = await started(s.config, tmp_path)
    await until(lambda: serving(s), 30)
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


async def test_a_stop_waits_for_streams_no_longer_than_it_was_told(s: Stack, tmp_path: Path) -> None:
    await s.gateway.stop()
    process = await started(changed(s.config, {"gateway": {"drain_s": 1.5}}), tmp_path)
    try:
        await until(lambda: serving(s), 30)
        s.workers[0].token_s = 0.02
        body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 100_000}
        async with s.http.post(f"{s.url}/v1/chat/completions", json=body) as r:
            async for _ in r.content:
                break
            process.terminate()

            async def draining() -> bool:
                async with s.http.get(f"{s.url}/ready") as ready:
                    return (
                        ready.status == 503
                        and "draining" in await ready.text()
                        and ready.headers["Connection"] == "close"
                    )

            await until(draining)
            async with s.http.post(f"{s.url}/v1/chat/completions", json=body) as refused:
                assert refused.status == 503 and refused.headers["Retry-After"] == "1"
            async with asyncio.timeout(20):
                chunks = await events(r)
                assert await process.wait() == 0
            assert (chunks[-1]["error"]["code"], chunks[-2]["choices"][0]["delta"]["content"][-1]) == (
                "unavailable",
                " ",
            ), "it is told so"
    finally:
        await ended(process)


async def test_processes_share_the_port_and_each_answers_for_the_metrics_of_all(s: Stack, tmp_path: Path) -> None:
    await s.gateway.stop()
    limits = {"requests_per_min": 40}
    config = changed(s.config, {"gateway": {"processes": 2, "limits": limits}})
    processes = [await started(config, tmp_path, number) for number in range(2)]
    try:
        await until(lambda: serving(s), 30)

        async def seen(pattern: str) -> set[str]:
            async with aiohttp.ClientSession() as http, http.get(f"{s.url}/metrics") as r:
                return set(re.findall(pattern, await r.text()))

        async def both() -> bool:
            # a new connection, so that either may get it
            async with aiohttp.ClientSession() as http, http.get(f"{s.url}/ready") as r:
                await r.read()
            return await seen(r'requests_total\{process="(\d)",route="/ready",status="200"\}') == {"0", "1"}

        await until(both, 30)  # each listens, and has heard of the fleet

        async def ask() -> aiohttp.ClientResponse:
            async with aiohttp.ClientSession() as http:  # a new connection, so that either may get it
                body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
                async with http.post(f"{s.url}/v1/chat/completions", json=body) as r:
                    await r.read()
                    return r

        answers = [await ask() for _ in range(24)]
        assert {r.headers["x-ratelimit-limit-requests"] for r in answers} == {"20"}, "each has its share"
        async with s.http.get(f"{s.url}/metrics") as r:
            text = await r.text()
        served = dict(
            re.findall(
                r'upbeat_gateway_requests_total\{process="(\d)",route="/v1/chat/completions",status="200"\} (\S+)', text
            )
        )
        assert set(served) == {"0", "1"} and sum(map(float, served.values())) == sum(r.status == 200 for r in answers)
        processes[0].kill()
        await processes[0].wait()

        async def alone() -> bool:
            try:
                return await seen(r'process="(\d)"') == {"1"}
            except OSError:
                return False

        await until(alone, 10)
        assert (await ask()).status in (200, 429)
    finally:
        for process in processes:
            await ended(process)


async def test_a_process_whose_number_is_taken_or_too_large_does_not_start(s: Stack, tmp_path: Path) -> None:
    process = await started(s.config, tmp_path, 1)
    _, errors = await process.communicate()
    assert process.returncode == 2 and b"gateway.processes" in errors
    config = changed(s.config, {"gateway": {"processes": 2, "port": free_ports(1)}})
    processes = [await started(config, tmp_path, 0) for _ in range(2)]
    try:
        done, _ = await asyncio.wait(
            [asyncio.create_task(p.wait()) for p in processes], timeout=30, return_when=asyncio.FIRST_COMPLETED
        )
        assert [task.result() for task in done] == [1]
    finally:
        for process in processes:
            await ended(process)


async def test_a_gateway_with_another_secret_than_its_schedulers_does_not_start_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleets = secret_id(b"f" * 32)
    monkeypatch.setattr(same_secret.SameSecret.__init__, "__defaults__", (lambda: fleets,))
    at, port = free_ports(1), free_ports(1)
    over = {"data": str(tmp_path / "data"), "gateway": {"port": port}, "scheduler": {"port": at}}
    config = load_config(None, over)
    server, _ = rpc.server(config.scheduler_addresses[0], ["upbeat.v1.Scheduler"])
    scheduler_pb2_grpc.add_SchedulerServicer_to_server(scheduler_pb2_grpc.SchedulerServicer(), server)
    await server.start()
    own = secret_id(cluster_secret(config.data))
    process = await started(config, tmp_path)
    async with asyncio.timeout(60):
        _, said = await process.communicate()
    await server.stop(0)
    assert process.returncode == WRONG_USAGE, said
    (line,) = [line for line in said.decode().splitlines() if '"error"' in line]
    assert all(word in line for word in (own, fleets, "Scheduler on 127.0.0.1", "copy the file DATA/secret"))


@pytest.mark.slow
@pytest.mark.sample
async def test_a_process_that_stops_refuses_nothing_while_another_has_the_port(s: Stack, tmp_path: Path) -> None:
    await s.gateway.stop()
    config = changed(s.config, {"gateway": {"processes": 2}})
    # A pipe that nobody reads would fill up.
    processes = [await started(config, tmp_path, number, DEVNULL) for number in range(2)]
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    stopped = asyncio.Event()

    async def both() -> bool:
        try:
            async with aiohttp.ClientSession() as http, http.get(f"{s.url}/ready") as r:  # either may get it
                await r.read()
            async with aiohttp.ClientSession() as http, http.get(f"{s.url}/metrics") as r:
                pattern = r'requests_total\{process="(\d)",route="/ready",status="200"\}'
                return set(re.findall(pattern, await r.text())) == {"0", "1"}
        except OSError:
            return False

    async def talk(*, keep_alive: bool) -> int:
        """Turns, on one connection as long as it lasts or each on a new one, until both processes were replaced."""
        turns = 0
        while not stopped.is_set():
            async with aiohttp.ClientSession() as http:
                while not stopped.is_set():
                    async with http.post(f"{s.url}/v1/chat/completions", json=body) as r:
                        assert r.status == 200, await r.text()
                        await r.read()
                    turns += 1
                    if not keep_alive:
                        break
        return turns

    try:
        await until(both, 30)
        talking = [asyncio.create_task(talk(keep_alive=number % 2 == 0)) for number in range(4)]
        for number in range(2):
            processes[number].terminate()
            assert await asyncio.wait_for(processes[number].wait(), 30) == 0
            processes[number] = await started(config, tmp_path, number, DEVNULL)
            await until(both, 30)
        stopped.set()
        turns = await asyncio.gather(*talking)
        assert all(turns), turns
    finally:
        for process in processes:
            await ended(process)
