"""The engine on the CUDA runner and copier: greedy tokens of a cold run, with pieces that are counted as ready while
they are copied.

Without a device, streams are threads: loads take a while, and compute that did not ask the fence would read pages
before their bytes.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from runtime.clock import RealClock
from tests.gpu.harness import CUDA, DEVICE, HERE, HostQueue, pool
from tests.worker.engine_harness import CHUNK, GRANULE, Harness, random_prompt, tiny_model
from tests.worker.owners import KV
from worker.devices.cuda.queue import CudaQueue
from worker.devices.cuda.runner import CudaRunner
from worker.devices.runner import Steps
from worker.memory.copier import Copier
from worker.memory.copies import fastest_copy
from worker.memory.cuda_copier import CudaCopier
from worker.memory.cuda_driver import CudaDriver, CudaError
from worker.memory.cuda_streams import CudaStream, Mark
from worker.memory.paged_kv import PagedKv
from worker.models.load import load_model

pytestmark = HERE


class Reached:
    """A mark of `LateStream`."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def reached(self) -> bool:
        return self.event.is_set()

    def wait(self) -> None:
        assert self.event.wait(30)


class LateStream:
    """A stream whose copies run on a thread, each some time after it was queued."""

    def __init__(self, late_s: float) -> None:
        self._late_s, self._copy = late_s, fastest_copy()
        self._work: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def copy(self, to: np.ndarray, source: np.ndarray, bytes_: int) -> None:
        def late() -> None:
            time.sleep(self._late_s)
            self._copy(to, source, bytes_)

        self._work.put(late)

    def mark(self) -> Mark:
        made = Reached()
        self._work.put(made.event.set)
        return made

    def wait_for(self, mark: Mark) -> None:
        self._work.put(mark.wait)

    def _run(self) -> None:
        while True:
            self._work.get()()


class HostCompute:
    """The compute stream of a queue that runs at once what is queued: waiting is waiting, and all that was queued has
    run."""

    def __init__(self) -> None:
        self.waits = 0

    def copy(self, to: np.ndarray, source: np.ndarray, bytes_: int) -> None:
        raise AssertionError("nothing is copied on the compute stream")

    def mark(self) -> Mark:
        made = Reached()
        made.event.set()
        return made

    def wait_for(self, mark: Mark) -> None:
        self.waits += 1
        mark.wait()


class NoLocks:
    def register(self, address: int, bytes_: int) -> None:
        raise CudaError("not here")

    def unregister(self, address: int) -> None:
        raise AssertionError("nothing was registered")


class PatientClock(RealClock):
    """The interpreter needs seconds a step; what the engine waits for others must not count them."""

    def now(self) -> float:
        return super().now() / 50


class CudaHouse(Harness):
    """An engine on the device of these tests."""

    late_s = 0.01

    def __init__(self, model: Path, **harness: int) -> None:
        super().__init__(model, **harness)  # type: ignore[arg-type]
        if not CUDA:
            self.executor.clock = PatientClock()

    def assemble(self, model: Path, pages: int, dtype: str, kernels: str) -> tuple[Steps, Copier]:
        self.memory = pool(64 << 20, GRANULE)
        self.model = load_model(model, self.memory, dtype, DEVICE.type, CHUNK, None)
        self.kv = PagedKv.reserve(self.memory, self.model.shape, pages, KV)
        if CUDA:
            queued, driver = CudaQueue(), CudaDriver()
            streams = CudaStream(driver, DEVICE, queued.stream), CudaStream(driver, DEVICE), CudaStream(driver, DEVICE)
            copier = CudaCopier(self.kv, driver, *streams)
            return CudaRunner(self.model, self.kv, queued, copier, 64, 4), copier
        self.compute = HostCompute()
        copier = CudaCopier(self.kv, NoLocks(), self.compute, LateStream(self.late_s), LateStream(0.0))
        return CudaRunner(self.model, self.kv, HostQueue(), copier, 64, 4), copier


class LateHouse(CudaHouse):
    """Copies take longer than a step's first layers."""

    late_s = 2.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def cold(model: Path) -> Iterator[Callable[[list[int], int], list[int]]]:
    """Tokens of a run on the CPU with nothing cached and nothing beside it."""
    harness = Harness(model, store=False, cache=False)
    yield lambda prompt, count: harness.run(prompt, count).tokens
    harness.close()


@pytest.mark.slow
@pytest.mark.sample
def test_a_session_that_left_hbm_comes_back_under_the_step_that_uses_it(
    model: Path, cold: Callable[[list[int], int], list[int]]
) -> None:
    harness, prompt = LateHouse(model), random_prompt(random.Random(1), 20)
    first = harness.run(prompt, 2)
    harness.purge()
    for slab in harness.kv.mapped_slabs:
        harness.kv.view[slab].fill_(float("nan"))  # what was there before must not help
    again = harness.run(prompt, 3)
    expected = cold(prompt, 3)
    assert first.tokens == expected[:2] and again.tokens == expected
    assert again.cached == 16 and harness.store is not None and harness.store.delivered == harness.model.shape.layers
    assert CUDA or harness.compute.waits, "compute was ordered behind copies under way"
    harness.close()


@pytest.mark.slow
def test_conversations_beside_each_other_under_pressure_keep_their_tokens(
    model: Path, cold: Callable[[list[int], int], list[int]]
) -> None:
    """Half of what is live fits: sessions are purged, loaded and preempted all the time."""
    harness, rng = CudaHouse(model, pages=48), random.Random(2)
    prompts = [random_prompt(rng, rng.randrange(20, 60)) for _ in range(4)]
    for _ in range(2):
        running = [harness.submit(prompt, 4, session=f"s{n}") for n, prompt in enumerate(prompts)]
        for prompt, result in zip(prompts, harness.wait(*running, timeout_s=200), strict=True):
            assert result.tokens == cold(prompt, 4)
    harness.close()
