"""Does a prefetch of 64 sessions delay decoding? A whole stack: the worker alone on one core, all else on another."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
import uvloop
from ground import SHAPE
from pairs import Figure, Pair
from wire import Stores, Worker

from contracts.ids import SessionKey
from loadtest.client import Endpoint
from loadtest.policies import fixed_answers
from loadtest.random_model import SHAPES, make_random_model
from loadtest.stack import Stack
from runtime.config_file import load_config

SESSIONS, CHUNKS = 64, 4
#: kv.prefetch_mb_s; 0: unpaced.
RATES = (50, 100, 200, 400, 0)
#: Percent that the prefetch may add to inter-token latency.
_MOST = 10.0
#: Seconds: of decoding without prefetch, between checks for the prefetch's end, until it counts as failed.
_CALM_S, _LOOK_S, _WAIT_S = 2.0, 0.1, 60.0


def measure(scratch: Path, quick: bool) -> list[Pair | Figure]:
    """A stack per rate. Decoding with and without prefetch alternates within one answer."""
    if len(os.sched_getaffinity(0)) < 2:
        raise RuntimeError("this needs two cores")
    config, dtype = SHAPES["131m"]
    model = make_random_model(scratch / "model", config, 1, dtype)
    found: list[Pair | Figure] = []
    within = 0.0
    for rate in (200,) if quick else RATES:
        figure, mb_s = _at_rate(scratch / f"rate-{rate}", model, rate, 2 if quick else 4)
        found.append(figure)
        if figure.value <= _MOST:
            within = max(within, mb_s)
    if not quick:
        found.append(
            Figure(
                f"the fastest of these prefetches beside which inter-token latency grows by {_MOST:.0f} % at most",
                round(within),
                "MB/s",
                at_least=1.0,
            )
        )
    return found


@dataclass
class _Turn:
    """Decoding without prefetch (calm) and with it (busy): seconds between tokens, the worker's processor seconds per
    token, and the prefetch's MB/s."""

    calm_s: float
    busy_s: float
    calm_cpu_s: float
    busy_cpu_s: float
    mb_s: float


def _at_rate(folder: Path, model: Path, rate: int, repetitions: int) -> tuple[Figure, float]:
    """(the figure, the prefetch's MB/s)."""
    amount = SESSIONS * CHUNKS * SHAPE.chunk_bytes
    uvloop.run(_fill(folder, repetitions + 1))
    settings = {"kv": {"prefetch_mb_s": rate}, "worker": {"threads": 1}}
    stack = Stack(
        model=model,
        nodes=1,
        hbm_gib=0.5,
        dram_gib=round(1.6 * amount / (1 << 30), 3),
        directory=folder,
        settings=settings,
    )
    with stack:
        first, second = sorted(os.sched_getaffinity(0))[:2]
        others, workers = {first}, []
        for process in psutil.process_iter(["cmdline"]):
            line = " ".join(process.info["cmdline"] or ())
            if str(folder) in line or str(stack.run_dir) in line:
                _pin(process.pid, {second} if "worker" in line else others)
                workers += [process] if "worker" in line else []
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, others)
        try:
            turns = uvloop.run(_decode(stack, model, repetitions, workers))
        finally:
            os.sched_setaffinity(0, before)
    mb_s = statistics.median(t.mb_s for t in turns)
    cpu = statistics.median(t.busy_cpu_s / t.calm_cpu_s for t in turns)
    pace = f"paced at {rate} MB/s" if rate else "unpaced"
    figure = Figure(
        f"inter-token latency beside a prefetch of {SESSIONS} sessions, {pace}",
        round(100 * (statistics.median(t.busy_s / t.calm_s for t in turns) - 1), 1),
        "% more",
        at_most=_MOST if rate == RATES[0] else None,
        note=f"{1e3 * statistics.median(t.calm_s for t in turns):.1f} ms without; {amount >> 20} MiB came at "
        f"{mb_s:.0f} MB/s; "
        f"the worker's processor time a token: {100 * (cpu - 1):+.0f} %",
        details={
            "calm_ms": [round(1e3 * t.calm_s, 2) for t in turns],
            "busy_ms": [round(1e3 * t.busy_s, 2) for t in turns],
            "calm_cpu_ms": [round(1e3 * t.calm_cpu_s, 2) for t in turns],
            "busy_cpu_ms": [round(1e3 * t.busy_cpu_s, 2) for t in turns],
            "mb_s": [round(t.mb_s, 1) for t in turns],
        },
    )
    return figure, mb_s


async def _fill(folder: Path, sets: int) -> None:
    """Put sessions on node 0's SSD and in the blob tier's manifests: a set per turn, because earlier sets may still be
    in the arena. Their model is not served."""
    with Stores(folder, 1, dram_gib=1.0) as stores:
        async with Worker(stores.address(0), SHAPE, 0) as worker:
            for number in range(sets * SESSIONS):
                keys = [np.random.default_rng([13, number, i]).bytes(32) for i in range(CHUNKS)]
                await worker.save(SessionKey("default", _session(number)), keys, number)


def _session(number: int) -> str:
    return f"prefetch-{number}"


def _pin(pid: int, cores: set[int]) -> None:
    for task in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(task), cores)


async def _decode(stack: Stack, model: Path, repetitions: int, workers: list[psutil.Process]) -> list[_Turn]:
    """Alternate decoding without and with prefetch; the first turn warms up and is left out."""
    amount = SESSIONS * CHUNKS * SHAPE.chunk_bytes
    endpoint = Endpoint(stack.url, stack.model_name(), body=fixed_answers(model))
    places = load_config(stack.config_file, {"nodes": {"count": 1}}).node(0)
    metrics = functools.partial(asyncio.to_thread, stack.metrics, places.store_metrics_port)
    arrivals: list[float] = []
    turns: list[_Turn] = []

    def stretch(begun: float, cpu_before: float) -> tuple[float, float]:
        """(mean seconds between tokens since `begun`, the worker's processor seconds per token)."""
        ended = time.perf_counter()
        within = [t for t in arrivals if begun <= t <= ended]
        if len(within) < 2:
            return ended - begun, ended - begun
        return (within[-1] - within[0]) / (len(within) - 1), (_cpu_s(workers) - cpu_before) / len(within)

    async with aiohttp.ClientSession() as http:
        decoding = asyncio.ensure_future(_tokens(http, endpoint, arrivals))
        while len(arrivals) < 20:
            await asyncio.sleep(0.05)
            if decoding.done():
                decoding.result()
                raise RuntimeError("decoding ended before it was measured")
        for turn in range(repetitions + 1):
            begun, cpu = time.perf_counter(), _cpu_s(workers)
            await asyncio.sleep(_CALM_S)
            calm = stretch(begun, cpu)
            sessions = [_session(turn * SESSIONS + i) for i in range(SESSIONS)]
            read, begun, cpu = await _read_bytes(metrics), time.perf_counter(), _cpu_s(workers)
            hints = [{"session_id": s, "model_id": endpoint.model, "expected_arrival": 30} for s in sessions]
            await _post(http, stack, "/v1/advisory", {"advisories": hints})
            deadline, came = begun + _WAIT_S, 0
            while came < amount and time.perf_counter() < deadline:
                await asyncio.sleep(_LOOK_S)
                came = await _read_bytes(metrics) - read
            if came < amount:
                raise RuntimeError(f"{came >> 20} of {amount >> 20} MiB came")
            mb_s = came / (time.perf_counter() - begun) / 1e6
            busy = stretch(begun, cpu)
            if turn:
                turns.append(_Turn(calm[0], busy[0], calm[1], busy[1], mb_s))
            for session in sessions:
                await _post(http, stack, "/v1/invalidate", {"session_id": session})
            await asyncio.sleep(0.3)
        decoding.cancel()
    return turns


def _cpu_s(processes: list[psutil.Process]) -> float:
    """Processor seconds the processes have used."""
    return sum(t.user + t.system for t in (p.cpu_times() for p in processes))


async def _tokens(http: aiohttp.ClientSession, endpoint: Endpoint, arrivals: list[float]) -> None:
    """Ask for one answer after another, so that one is always decoding; append token times to `arrivals`."""
    while True:
        body: dict[str, Any] = endpoint.body | {
            "model": endpoint.model,
            "messages": [{"role": "user", "content": "one two three four"}],
            "max_tokens": 1500,
            "ignore_eos": True,
            "stream": True,
        }
        async with http.post(endpoint.base_url + "/v1/chat/completions", json=body) as reply:
            reply.raise_for_status()
            async for line in reply.content:
                if line.startswith(b"data: {") and json.loads(line[6:]).get("choices"):
                    arrivals.append(time.perf_counter())


async def _post(http: aiohttp.ClientSession, stack: Stack, path: str, body: dict[str, Any]) -> None:
    async with http.post(stack.url + path, json=body) as reply:
        if reply.status != 202:
            raise RuntimeError(f"{path} was answered {reply.status}: {await reply.text()}")


async def _read_bytes(metrics: Callable[[], Awaitable[str]]) -> int:
    """Bytes the node's store has read from slower tiers since its start."""
    found = re.findall(r"^upbeat_kvstore_read_bytes_total\{.+\} (.+)$", await metrics(), re.M)
    return sum(int(float(value)) for value in found)
