"""Our engine in this process, with real store processes, and ways to put a session's cache into one tier only."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import shutil
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench" / "kvstore"))

import wire  # noqa: E402

from contracts.frames import StepFrame  # noqa: E402
from contracts.kv import chunk_keys  # noqa: E402
from contracts.request import GenerateRequest, Sampling  # noqa: E402
from runtime import telemetry  # noqa: E402
from runtime.service import Tasks  # noqa: E402
from storelink.link import StoreLink  # noqa: E402
from worker.__main__ import WorkerProcess  # noqa: E402
from worker.core.instructions import Step  # noqa: E402
from worker.core.progress import Progress  # noqa: E402
from worker.engine.engine import Submit  # noqa: E402
from worker.engine.stepping import Outcome, Stepping  # noqa: E402
from worker.link.ends import end_of  # noqa: E402
from worker.link.loads import StepProgress  # noqa: E402

#: Nodes: the engine's, the peer with the session in its DRAM, and one with an empty store.
HOME, PEER, EMPTY = 0, 1, 2
_TENANT = "bench"
_LIMIT_S = 300.0


class Stores(wire.Stores):
    """The stores of three nodes. A restart empties a store's DRAM and, on request, its disk."""

    def __init__(self, folder: Path, model: Path, threads: int, **kv: Any) -> None:
        super().__init__(folder, 3, **kv)
        worker = self.config.worker.model_copy(update={"threads": threads})
        self.config = self.config.model_copy(update={"model": model, "worker": worker})

    def again(self, node: int, *, erase: bool = False) -> None:
        """Restart the node's store after write-back."""
        process = self._processes[node]
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=40)
        process.kill()
        process.wait()
        if erase:
            shutil.rmtree(self.config.data / f"node-{node}", ignore_errors=True)
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        log = (self._folder / f"kvstore-{node}.log").open("ab")
        command = [*self._command, "--config", str(self._file), "--node", str(node)]
        self._processes[node] = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env=environment)
        self._wait(node)

    def ssd_files(self, node: int) -> list[Path]:
        """The node's chunk files."""
        return [path for path in (self.config.data / f"node-{node}" / "ssd").rglob("*") if path.is_file()]


class TimedSteps:
    """The engine's steps, with begin and end of the last one (performance counter, seconds)."""

    def __init__(self, stepping: Stepping) -> None:
        self._stepping = stepping
        self.spans: list[tuple[float, float]] = []

    @property
    def beats(self) -> Progress:
        """See `Stepping.beats`."""
        return self._stepping.beats

    def run(self, step: Step, progress: StepProgress | None = None) -> Outcome:
        """See `Stepping.run`."""
        began = time.perf_counter()
        try:
            return self._stepping.run(step, progress)
        finally:
            self.spans.append((began, time.perf_counter()))


class Turn:
    """Collects a request's frames: the time of the first token, and the tokens."""

    def __init__(self) -> None:
        self.first_s = 0.0
        self.came_s: list[float] = []
        self.tokens: list[int] = []
        self.cached = 0
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()

    def put(self, frame: StepFrame) -> None:
        """Receive a frame. Runs on the engine's thread."""
        for output in frame.outputs:
            if output.tokens and not self.tokens:
                self.first_s = time.perf_counter()
            self.came_s.append(time.perf_counter())
            self.tokens += output.tokens
            self.cached = output.cached_tokens
            if output.finish_reason:
                self._ended.put(None)

    def wait(self) -> None:
        """Wait until the request has ended."""
        self._ended.get(timeout=_LIMIT_S)


class Ours:
    """The worker's process object on an event loop in a thread. A context manager."""

    def __init__(self, stores: Stores) -> None:
        self.stores = stores
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._count = 0
        self.home = HOME

    def __enter__(self) -> Ours:
        self._thread.start()
        self._do(self._start())
        self._until(lambda: self.engine.core.state.store_here)
        return self

    async def _start(self) -> None:
        self._tasks = Tasks()
        self.process = WorkerProcess(self.stores.config, HOME, self._tasks)
        await self.process.start()
        self.engine = self.process.engine
        self.steps = TimedSteps(self.engine.stepping)
        self.engine.stepping = self.steps  # type: ignore[assignment]

    def __exit__(self, *_: object) -> None:
        self._do(self.process.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _do(self, doing: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(doing, self._loop).result(timeout=_LIMIT_S)

    @staticmethod
    def _until(true: Any) -> None:
        deadline = time.monotonic() + _LIMIT_S
        while not true():
            if time.monotonic() > deadline:
                raise RuntimeError("the engine and its store did not settle")
            time.sleep(0.01)

    def attach(self, node: int) -> None:
        """Switch the engine to this node's store."""
        if node != self.home:
            self._do(self._attach(node))
            self.home = node
        self.attached()

    async def _attach(self, node: int) -> None:
        for task in [t for t in asyncio.all_tasks() if t.get_name() == "store link"]:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        executor, config = self.engine.executor, self.stores.config
        to_engine, to_loader = self.engine.inbox.put, self.engine.executor.loader.from_store
        ends, log = [end_of(executor.shape, to_engine, to_loader)], telemetry.logger("storelink.link")
        link = StoreLink(self.stores.address(node), config.node(HOME).name, ends, log, config.kv.hugepages)
        executor.link = executor.loader.link = link
        self._tasks.start(link.run(), "store link")

    def attached(self) -> None:
        """Wait until the engine is attached to its store, also after a restart."""
        self._until(lambda: self.engine.core.state.store_here and self.engine.idle)

    def settle(self) -> None:
        """Wait until everything is saved below HBM."""
        self._until(lambda: self.engine.idle and not self.engine.executor.table.open)

    def name_of(self, node: int) -> str:
        """The node's name."""
        return self.stores.config.node(node).name

    def restart_store(self, node: int) -> None:
        """Restart the engine's store and wait until the engine is attached again."""
        link = self.engine.executor.link
        assert link is not None and node == self.home
        before = link.arena
        self.stores.again(node)
        self._until(lambda: link.arena is not None and link.arena is not before)
        self.attached()

    def question_ms(self, times: int) -> float:
        """Median milliseconds until the store answers that it lacks a chunk."""
        executor = self.engine.executor

        async def ask() -> float:
            async with wire.Worker(self.stores.address(self.home), executor.shape, 1) as worker:
                took = []
                for _ in range(times):
                    began = time.perf_counter()
                    with contextlib.suppress(RuntimeError):  # "0 of 1 chunks came"
                        await worker.load([os.urandom(32)], copy=False)
                    took.append(1e3 * (time.perf_counter() - began))
                return round(statistics.median(took), 3)

        return float(self._do(ask()))

    def forget_hbm(self) -> None:
        """Purge every page of HBM."""
        self.settle()
        cache = self.engine.executor.cache
        if not cache.make_room(cache.pool.total, 1e12):
            raise RuntimeError("HBM could not be emptied")

    def switch(self, **kv: bool) -> None:
        """Turn `kv.layerwise` or `kv.cache` on or off."""
        state = self.engine.core.state
        state.policy = replace(state.policy, **kv)

    def ask(
        self, session: str, prompt: list[int], count: int = 1, sources: list[str] | None = None
    ) -> tuple[float, Turn]:
        """(seconds from handing token ids to the engine until the first token's frame, the turn)."""
        self._count += 1
        sampling = Sampling(temperature=0.0, ignore_eos=True, max_tokens=count)
        request = GenerateRequest(
            f"r{self._count}",
            _TENANT,
            session,
            self.engine.model_name,
            sampling,
            prompt_tokens=prompt,
            source_nodes=sources or [],
        )
        turn = Turn()
        self.steps.spans.clear()
        begun = time.perf_counter()
        self.engine.inbox.put(Submit(request, prompt, count, turn))
        turn.wait()
        return turn.first_s - begun, turn

    def bring_to_peer(self, prompt: list[int]) -> None:
        """Load this prompt's chunks into the peer's DRAM."""
        executor = self.engine.executor
        keys = chunk_keys(executor.salt_of(_TENANT), executor.shape, prompt)

        async def take() -> None:
            async with wire.Worker(self.stores.address(PEER), executor.shape, 1) as worker:
                await worker.load(keys, [self.stores.config.node(HOME).name], copy=False)

        self._do(take())

    def flush(self, node: int) -> None:
        """Wait until the node's store has written back."""

        async def write() -> None:
            async with wire.Worker(self.stores.address(node), self.engine.executor.shape, 1) as worker:
                await worker.flush()

        self._do(write())


def leave_page_cache(paths: list[Path]) -> None:
    """Drop these files from the page cache; all clean pages if permitted."""
    for path in paths:
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
    with contextlib.suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("1")


def enter_page_cache(paths: list[Path]) -> None:
    """Read these files into the page cache."""
    for path in paths:
        with contextlib.suppress(OSError):
            path.read_bytes()
