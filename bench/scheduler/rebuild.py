"""Measures how long a killed and restarted scheduler takes to know its fleet and sessions, and how it answers
meanwhile.

Three processes over real gRPC: the scheduler, one that plays all nodes (a worker's and a store's stream each), and this
one, which asks for placements and watches. `python bench/scheduler/rebuild.py [--nodes N] [--sessions N] [--times N]`
prints the figures; `measure` returns them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from contracts.identity import SCHEDULER
from contracts.v1 import common_pb2, scheduler_pb2_grpc
from contracts.v1 import scheduler_pb2 as pb
from gateway.placing import Placing
from loadtest.stack import free_ports
from runtime import rpc

ROOT = Path(__file__).resolve().parents[2]
MODEL = "m"
SESSIONS_A_MESSAGE = 500
ASK_EVERY_S = 0.005
LIMIT_S = 60.0


# ---- the nodes -----------------------------------------------------------------------------------------------------


class PlayedNode:
    """A node's two streams, reopened when they break, like a worker's and a store's. Messages are made first."""

    def __init__(self, address: str, number: int, sessions: int) -> None:
        self.name = f"node-{number}"
        self.channels = [rpc.channel(address, SCHEDULER, rpc.SCHEDULER_RECONNECT_S) for _ in range(2)]
        shape = common_pb2.KvShape(
            fingerprint=b"f" * 32, layers=24, kv_heads=8, head_dim=64, chunk_tokens=64, dtype="bfloat16"
        )
        model = pb.ModelInfo(name=MODEL, shape=shape, max_tokens=8192)
        self.worker_hello = pb.WorkerHello(node=self.name, address=f"{self.name}:1", models=[model], instance="1")
        self.store_hello = pb.StoreHello(node=self.name, address=f"{self.name}:2", instance="1")
        held = [
            pb.Held(
                session=common_pb2.Session(
                    tenant="default", session_id=f"{number:04x}{n:08x}-4c1e-4a5e-9c57-2f0d6b7d{n % 9973:04d}"
                ),
                model=MODEL,
                tokens_total=64 * (n % 50 + 2),
                tokens_here=64 * (n % 50 + 2),
                bytes_here=3_145_728 * (n % 50 + 2),
                last_use_s=1_760_000_000.0 + n,
                tokens_dram=64,
            )
            for n in range(sessions)
        ]
        starts = range(0, len(held), SESSIONS_A_MESSAGE)
        self.held = [
            pb.StoreReport(
                held=pb.HeldSessions(
                    full=i == 0, joining=True, number=i + 1, sessions=held[at : at + SESSIONS_A_MESSAGE]
                )
            )
            for i, at in enumerate(starts)
        ]

    async def run(self) -> None:
        """Report until cancelled."""
        await asyncio.gather(
            self._keep(0, "WorkerReports", self._as_worker), self._keep(1, "StoreReports", self._as_store)
        )

    async def _keep(self, channel: int, method: str, reports: Any) -> None:
        stub: Any = scheduler_pb2_grpc.SchedulerStub(self.channels[channel])  # type: ignore[no-untyped-call]
        connection = 0
        while True:
            connection += 1
            try:
                async for _ in getattr(stub, method)(reports(connection), wait_for_ready=True):
                    pass
            except grpc.aio.AioRpcError:
                pass
            await asyncio.sleep(0.1)

    async def _as_worker(self, connection: int) -> AsyncIterator[pb.WorkerReport]:
        self.worker_hello.connection = connection
        yield pb.WorkerReport(hello=self.worker_hello)
        number = 0
        while True:
            number += 1
            yield pb.WorkerReport(
                load=pb.WorkerLoad(hbm_pages_total=1000, hbm_pages_free=900, request_s=0.5, number=number)
            )
            await asyncio.sleep(0.25)

    async def _as_store(self, connection: int) -> AsyncIterator[pb.StoreReport]:
        self.store_hello.connection = connection
        yield pb.StoreReport(hello=self.store_hello)
        for report in self.held:
            yield report
        while True:
            yield pb.StoreReport(load=pb.StoreLoad(dram_bytes_total=1 << 36))
            await asyncio.sleep(1.0)


async def _play(address: str, nodes: int, sessions: int) -> None:
    played = [PlayedNode(address, n, sessions // nodes) for n in range(nodes)]
    print("ready", flush=True)
    await asyncio.gather(*(node.run() for node in played))


# ---- the scheduler and who asks it ---------------------------------------------------------------------------------


class Asker:
    """Asks for placements continuously. seconds: the answers' latencies by their start."""

    def __init__(self, address: str) -> None:
        self.channel = rpc.channel(address, SCHEDULER)
        self.stub: Any = scheduler_pb2_grpc.SchedulerStub(self.channel)  # type: ignore[no-untyped-call]
        self.placing = Placing(self.stub)
        self.answers: list[tuple[float, float]] = []

    async def run(self) -> None:
        """Ask until cancelled."""
        asked = 0
        while True:
            asked += 1
            wanted = pb.PlaceRequest(
                request_id=f"r{asked}",
                session=common_pb2.Session(tenant="default", session_id=f"new-{asked}"),
                model=MODEL,
            )
            began = time.monotonic()
            try:
                answer = await self.placing.ask(wanted, 5)
                if answer.HasField("placed"):
                    self.answers.append((began, time.monotonic() - began))
            except OSError:
                pass
            await asyncio.sleep(ASK_EVERY_S)

    async def until(self, nodes: int, sessions: int) -> dict[str, float]:
        """Monotonic times at which it answered, all nodes served, and all sessions were known."""
        at: dict[str, float] = {}
        async with asyncio.timeout(LIMIT_S):
            while "sessions" not in at:
                with contextlib.suppress(grpc.aio.AioRpcError):  # may report the end of the last one
                    async for fleet in self.stub.Watch(pb.WatchRequest(), wait_for_ready=True):
                        now = time.monotonic()
                        at.setdefault("answers", now)
                        if sum(n.serving for n in fleet.nodes) >= nodes:
                            at.setdefault("nodes", now)
                        if sum(n.sessions for n in fleet.nodes) >= sessions and "nodes" in at:
                            at["sessions"] = now
                            break
        return at


def _start(config: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "scheduler", "--config", str(config)]
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def _start_players(arguments: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, *arguments], stdout=subprocess.PIPE)


async def _measure(nodes: int, sessions: int, times: int) -> dict[str, Any]:
    port = free_ports(1)
    address = f"127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(
            json.dumps(
                {"model_name": MODEL, "scheduler": {"port": port}, "nodes": {"count": nodes, "base_port": 40_000}}
            )
        )
        arguments = ["--play", address, "--nodes", str(nodes), "--sessions", str(sessions)]
        players = _start_players(arguments)
        scheduler = _start(config)
        asker = Asker(address)
        try:
            assert players.stdout is not None
            await asyncio.to_thread(players.stdout.readline)
            empty = psutil.Process(scheduler.pid).memory_info().rss
            await asker.until(nodes, sessions)
            asking = asyncio.ensure_future(asker.run())
            rounds = []
            for _ in range(times):
                await asyncio.sleep(2.0)
                memory = psutil.Process(scheduler.pid).memory_info().rss
                scheduler.send_signal(signal.SIGKILL)
                scheduler.wait()
                began = time.monotonic()
                scheduler = _start(config)
                at = await asker.until(nodes, sessions)
                during = [s for asked, s in asker.answers if at["answers"] <= asked <= at["sessions"] + 0.1]
                rounds.append(
                    {
                        "start_s": at["answers"] - began,
                        "nodes_s": at["nodes"] - at["answers"],
                        "sessions_s": at["sessions"] - at["answers"],
                        "places_s": min(
                            (asked + s for asked, s in asker.answers if asked + s > began), default=at["nodes"]
                        )
                        - at["answers"],
                        "slowest_answer_s": max(during, default=0.0),
                    }
                )
            asking.cancel()
        finally:
            for process in (scheduler, players):
                process.kill()
                process.wait()
            await asker.channel.close(None)
    middle = {name: round(statistics.median(r[name] for r in rounds), 3) for name in rounds[0]}
    return {
        "nodes": nodes,
        "sessions": sessions,
        "rounds": times,
        **middle,
        "worst_sessions_s": round(max(r["sessions_s"] for r in rounds), 3),
        "memory_mib": round(memory / (1 << 20), 1),
        "bytes_a_session": round((memory - empty) / sessions),
    }


def measure(nodes: int = 100, sessions: int = 100_000, times: int = 5) -> dict[str, Any]:
    """Medians over `times` restarts.

    start_s: from exec to the first answer (Python's imports); nodes_s and sessions_s: from there until all nodes serve
    and all sessions are known; places_s: until it places turns, as it refuses to while its fleet gathers;
    slowest_answer_s: of the placements asked for meanwhile.
    """
    return asyncio.run(_measure(nodes, sessions, times))


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--sessions", type=int, default=100_000)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--play", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.play:
        asyncio.run(_play(given.play, given.nodes, given.sessions))
    else:
        print(json.dumps(measure(given.nodes, given.sessions, given.times), indent=1))


if __name__ == "__main__":
    main()
