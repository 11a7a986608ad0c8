"""LMCache's native file-system backend and Mooncake Store against ours: the same bytes and sizes, in turns.

Both run in the virtual environment `.cache/bench-peers`, made on first use, with the project's torch.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from ground import GB, KEYS, SHAPE, arena, bands, chunks
from pairs import Figure, Pair, compare
from ssd_rates import read_by_store, sums_of, write_by_store
from wire import ROOT, Stores, Worker

from contracts.ids import SessionKey
from kvstore.core.events import Wrote
from kvstore.tiers import nixl
from kvstore.tiers.file_io import make_file_io
from kvstore.tiers.ssd import SsdTier
from loadtest.stack import free_ports

ENVIRONMENT = ROOT / ".cache" / "bench-peers"
PINNED = ("lmcache==0.5.6", "mooncake-transfer-engine-non-cuda==0.3.13", "nvidia-cuda-runtime-cu12==12.9.79")
_SYSTEM = "apt-get install libibverbs1 librdmacm1 libnl-3-200 libnl-route-3-200"


def measure(scratch: Path, quick: bool) -> list[Pair | Figure]:
    """Chunks of 768 KiB; a repetition moves 96 MiB (LMCache) or 48 MiB (Mooncake)."""
    python = environment()
    repetitions = 3 if quick else 10
    return [*beside_lmcache(scratch, python, repetitions), *beside_mooncake(scratch, python, repetitions)]


def environment() -> Path:
    """The interpreter of the other stores' environment, which is made if missing."""
    python = ENVIRONMENT / "bin" / "python"
    done = ENVIRONMENT / "installed"
    if not done.exists() or done.read_text() != " ".join(PINNED):
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(ENVIRONMENT)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", "--no-deps", *PINNED], check=True)
        done.write_text(" ".join(PINNED))
    return python


class Child:
    """A process of `other_store_child.py`, which answers each command with seconds."""

    def __init__(self, python: Path, *arguments: object) -> None:
        site = next((ENVIRONMENT / "lib").glob("python*/site-packages"))
        project = next(p for p in sys.path if p.endswith("site-packages"))
        child = os.environ | {
            "PYTHONPATH": f"{site}{os.pathsep}{project}",
            "LD_LIBRARY_PATH": str(site / "nvidia" / "cuda_runtime" / "lib"),
            "MC_TCP_BIND_ADDRESS": "127.0.0.1",
        }
        script = Path(__file__).with_name("other_store_child.py")
        self._process = subprocess.Popen(
            [str(python), str(script), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=child,
            text=True,
        )
        ready = self._answer()
        if "error" in ready:
            self.close()
            raise RuntimeError(f"{arguments[0]}: {ready['error']} (Mooncake needs: {_SYSTEM})")

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        return {"error": f"ended with status {self._process.wait()}"}

    def seconds(self, command: str) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return float(answer["seconds"])

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def beside_lmcache(scratch: Path, python: Path, repetitions: int) -> list[Pair | Figure]:
    """LMCache's C++ connector without its Python layer. It never syncs, so puts are measured with and without an added
    sync."""
    count = 128
    amount = count * SHAPE.chunk_bytes
    found: list[Pair | Figure] = []
    nixl.set_environment("lo")
    with arena(2 * amount) as memory:
        writes = chunks(memory, SHAPE, count)
        tier = SsdTier(
            scratch / "ssd",
            memory,
            KEYS,
            make_file_io("auto", memory, "ours-reads"),
            make_file_io("auto", memory, "ours-writes"),
            "auto",
        )
        assert set(tier.write(writes)) == {Wrote.OK}
        reads = bands(writes, SHAPE.layers, base=amount, sums=sums_of(tier, writes))
        put = partial(write_by_store, tier, memory, writes, scratch)
        for direct in (1, 0):
            child = Child(python, "lmcache", scratch / f"lmcache-{direct}", count, SHAPE.chunk_bytes, direct)
            how = "O_DIRECT" if direct else "page cache"
            note = f"{amount >> 20} MiB in chunks of {SHAPE.chunk_bytes >> 10} KiB; LMCache with {how} and 4 workers"
            try:
                for command, name, mine in (
                    ("put", "put, ours durable, LMCache's not", put),
                    ("put-sync", "put, both durable", put),
                    ("get-cold", "get, cold, ours verified", partial(read_by_store, tier, SHAPE, reads)),
                    ("get", "get, the page cache as it is, ours verified", partial(read_by_store, tier, SHAPE, reads)),
                ):
                    question = f"LMCache's disk backend: {name}"
                    found.append(
                        compare(
                            question, mine, partial(child.seconds, command), amount / GB, "GB/s", repetitions, note=note
                        )
                    )
            finally:
                child.close()
        tier.close()
    return found


def beside_mooncake(scratch: Path, python: Path, repetitions: int) -> list[Pair | Figure]:
    """Another process's memory over TCP, as it does without RDMA; ours: another node's DRAM into this node's worker."""
    return uvloop.run(_beside_mooncake(scratch, python, repetitions))


async def _beside_mooncake(scratch: Path, python: Path, repetitions: int) -> list[Pair | Figure]:
    count = 64
    amount = count * SHAPE.chunk_bytes
    sets = [[np.random.default_rng([11, n, i]).bytes(32) for i in range(count)] for n in range(5)]
    gib = amount / (1 << 30)
    reads_only = {1: {"UPBEAT__KV__WRITE_BACK_LIMIT_BYTES": str(1 << 20), "UPBEAT__KV__DRAM_GIB": str(2.5 * gib)}}
    port = free_ports(4)
    child = await asyncio.to_thread(Child, python, "mooncake", port, count, SHAPE.chunk_bytes)
    try:
        with Stores(scratch / "beside-mooncake", 2, reads_only, dram_gib=6.5 * gib) as stores:
            async with (
                Worker(stores.address(0), SHAPE, amount) as owner,
                Worker(stores.address(1), SHAPE, amount) as reader,
            ):
                for n, keys in enumerate(sets):
                    await owner.save(SessionKey("bench", f"m-{n}"), keys, n)
                loop = asyncio.get_running_loop()
                turns = itertools.cycle(sets)
                fresh = itertools.count()

                def get() -> float:
                    return asyncio.run_coroutine_threadsafe(reader.load(next(turns), ["node-0"]), loop).result()

                def near() -> float:
                    return asyncio.run_coroutine_threadsafe(owner.load(sets[-1]), loop).result()

                def put() -> float:
                    keys: Sequence[bytes] = [np.random.default_rng([12, next(fresh)]).bytes(32) for _ in range(count)]
                    return asyncio.run_coroutine_threadsafe(owner.put(SessionKey("bench", "put"), keys), loop).result()

                def all_of_it() -> list[Pair | Figure]:
                    for _ in range(3):
                        get()
                    note = f"{amount >> 20} MiB in chunks of {SHAPE.chunk_bytes >> 10} KiB, two processes"
                    return [
                        compare(
                            f"Mooncake Store: {name}",
                            mine,
                            partial(child.seconds, command),
                            amount / GB,
                            "GB/s",
                            repetitions,
                            note=note,
                        )
                        for name, mine, command in (
                            ("get over TCP, ours from the other node's DRAM, verified, into HBM", get, "get"),
                            ("get over TCP, ours from this node's DRAM into HBM", near, "get"),
                            ("put over TCP, ours from HBM into this node's DRAM", put, "put"),
                        )
                    ]

                return await asyncio.to_thread(all_of_it)
    finally:
        await asyncio.to_thread(child.close)
