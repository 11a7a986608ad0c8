"""Does a prefetch of 64 sessions hold up a running decode? A whole stack: the worker alone on one core, everything else on the other."""

from __future__ import annotations

import asyncio
import json
import os
import re
import statistics
import time
import urllib.request
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
from runtime.config import load_config

SESSIONS, CHUNKS = 64, 4
#: kv.prefetch_mb_s; 0: as fast as it can.
RATES = (100, 200, 400, 0)
_WAIT_S = 60.0


def measure(scratch: Path, quick: bool) -> list[Pair | Figure]:
    """For each rate a stack of its own; stretches of decoding with and without prefetch take turns in one answer."""
    if len(os.sched_getaffinity(0)) < 2:
        raise RuntimeError("this needs two cores")
    config, dtype = SHAPES["131m"]
    model = make_random_model(scratch / "model", config, 1, dtype)
    found: list[Pair | Figure] = []
    for rate in (200,) if quick else RATES:
        found.append(_at_rate(scratch / f"rate-{rate}", model, rate, 2 if quick else 4))
    return found


def _at_rate(folder: Path, model: Path, rate: int, repetitions: int) -> Figure:
    amount = SESSIONS * CHUNKS * SHAPE.chunk_bytes
    uvloop.run(_fill(folder, repetitions + 1))
    settings = {"kv": {"prefetch_mb_s": rate}, "worker": {"threads": 1}}
    stack = Stack(model=model, nodes=1, hbm_gib=0.5, dram_gib=round(1.6 * amount / (1 << 30), 3), directory=folder, settings=settings)
    with stack:
        first, second = sorted(os.sched_getaffinity(0))[:2]
        others = {first}
        for process in psutil.process_iter(["cmdline"]):
            line = " ".join(process.info["cmdline"] or ())
            if str(folder) in line or str(stack.run_dir) in line:
                _pin(process.pid, {second} if "worker" in line else others)
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, others)
        try:
            calm, busy, mb_s = uvloop.run(_decode(stack, model, repetitions))
        finally:
            os.sched_setaffinity(0, before)
    ratios = [b / a for a, b in zip(calm, busy, strict=True)]
    pace = f"paced at {rate} MB/s" if rate else "unpaced"
    return Figure(
        f"inter-token latency beside a prefetch of {SESSIONS} sessions, {pace}",
        round(100 * (statistics.median(ratios) - 1), 1),
        "% more",
        at_most=10.0 if rate == RATES[0] else None,
        note=f"{1e3 * statistics.median(calm):.1f} ms without; {amount >> 20} MiB came at {statistics.median(mb_s):.0f} MB/s",
        details={"calm_ms": [round(1e3 * x, 2) for x in calm], "busy_ms": [round(1e3 * x, 2) for x in busy], "mb_s": mb_s},
    )


async def _fill(folder: Path, sets: int) -> None:
    """A set of sessions for each turn, as what was read once may still be in the arena: of a model that nobody serves, on node 0's
    SSD and in the blob tier's list of sessions."""
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


async def _decode(stack: Stack, model: Path, repetitions: int) -> tuple[list[float], list[float], list[float]]:
    """Median inter-token seconds of each stretch without and with prefetch, and the MB/s at which it came."""
    amount = SESSIONS * CHUNKS * SHAPE.chunk_bytes
    endpoint = Endpoint(stack.url, stack.model_name(), body=fixed_answers(model))
    arrivals: list[float] = []
    calm, busy, mb_s = [], [], []
    async with aiohttp.ClientSession() as http:
        decoding = asyncio.ensure_future(_tokens(http, endpoint, arrivals))
        while len(arrivals) < 20:
            await asyncio.sleep(0.05)
            if decoding.done():
                decoding.result()
                raise RuntimeError("decoding ended before it was measured")
        for turn in range(repetitions + 1):
            begun = time.perf_counter()
            await asyncio.sleep(1.5)
            quiet = _gap(arrivals, begun, time.perf_counter())
            sessions = [_session(turn * SESSIONS + i) for i in range(SESSIONS)]
            read, begun = _read_bytes(stack), time.perf_counter()
            hints = [{"session_id": s, "model_id": endpoint.model, "expected_arrival": 30} for s in sessions]
            await _post(http, stack, "/v1/advisory", {"advisories": hints})
            deadline = begun + _WAIT_S
            while _read_bytes(stack) - read < amount and time.perf_counter() < deadline:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.05)
            ended = time.perf_counter()
            came = _read_bytes(stack) - read
            if came < 0.95 * amount:
                raise RuntimeError(f"{came >> 20} of {amount >> 20} MiB came")
            if turn:  # the first one pays for first times
                calm.append(quiet)
                busy.append(_gap(arrivals, begun, ended))
                mb_s.append(round(came / (ended - begun) / 1e6, 1))
            for session in sessions:
                await _post(http, stack, "/v1/invalidate", {"session_id": session})
            await asyncio.sleep(0.3)
        decoding.cancel()
    return calm, busy, mb_s


def _gap(arrivals: list[float], begun: float, ended: float) -> float:
    """Mean seconds between the tokens that came in between; a stretch without two has one gap, its length."""
    within = [t for t in arrivals if begun <= t <= ended]
    return (within[-1] - within[0]) / (len(within) - 1) if len(within) > 1 else ended - begun


async def _tokens(http: aiohttp.ClientSession, endpoint: Endpoint, arrivals: list[float]) -> None:
    """One answer after the other, so that something is always decoding."""
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


def _read_bytes(stack: Stack) -> int:
    """What the node's store has read from its SSD since it started."""
    places = load_config(stack.config_file, {"nodes": {"count": 1}}).node(0)
    host, port = places.store_address.rsplit(":", 1)
    with urllib.request.urlopen(f"http://{host}:{int(port) + 4}/metrics", timeout=5) as reply:
        text = reply.read().decode()
    found = re.search(r'^upbeat_kvstore_read_bytes_total\{source="ssd"\} (.+)$', text, re.M)
    return int(float(found[1])) if found else 0
