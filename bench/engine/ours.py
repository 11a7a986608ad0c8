"""Our side of bench/engine: the worker's engine, without gateway, store and text, answering `protocol.py`'s commands.

The engine is production code: its thread schedules, runs steps on the compiled kernels, samples, keeps chunk keys and
hands out frames. Neither side detokenises.
"""

from __future__ import annotations

import ctypes
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from protocol import MOST_NEW_TOKENS, arguments, prompt, serve

from contracts.frames import StepFrame
from contracts.ids import SessionKey
from contracts.kv import chunk_keys, tenant_salt
from contracts.request import GenerateRequest, Sampling
from runtime.clock import RealClock
from runtime.sections import KvSection, WorkerSection
from worker.core.block import SaveState
from worker.core.granules import Owner, Use
from worker.core.hbm import HbmCache
from worker.core.pages import PagePool
from worker.devices.cpu.native_runner import NativeRunner
from worker.devices.runner import Slice, Steps
from worker.engine.device_loop import DeviceLoop
from worker.engine.engine import Cancel, NativeEngine, Submit
from worker.engine.executor import Executor
from worker.kernels.build import AVX2_ONLY, library
from worker.kernels.cpu_kernels import CpuKernels
from worker.link.kv_loader import KvLoader
from worker.link.loads import LoadTable
from worker.memory.device_memory import host_memory
from worker.memory.paged_kv import PagedKv
from worker.models.load import load_model
from worker.text.codec import Detokenizer, TextCodec

GRANULE_BYTES = 2 << 20
TIMEOUT_S = 3600.0
#: Memory for the weights, beside the KV cache.
WEIGHTS_GIB = 0.5
#: The value of synthetic keys and values.
MADE_UP = 0.015
LIBC = ctypes.CDLL(None)
LIBC.memchr.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]


class Silent(Detokenizer):
    """Produces no text, like the other side."""

    def push(self, token: int) -> str:
        return ""


class NoText(TextCodec):
    """The model's codec without text output."""

    def detokenizer(self, skip_special: bool = True) -> Detokenizer:
        return Silent(self, skip_special)


class Gated:
    """A runner whose steps wait for permission, so that this process is idle while the other is measured."""

    def __init__(self, runner: Steps) -> None:
        self._runner = runner
        self._changed = threading.Condition()
        self._permitted: int | None = None
        self._waits = False

    def open(self) -> None:
        """Every step may run."""
        with self._changed:
            self._permitted = None
            self._changed.notify_all()

    def shut(self) -> None:
        """No step may run."""
        with self._changed:
            self._permitted = 0

    def close(self) -> None:
        """No step may run; returns when the engine waits for permission."""
        self.shut()
        with self._changed:
            if not self._changed.wait_for(lambda: self._waits, TIMEOUT_S):
                raise RuntimeError("the engine has nothing to do")

    def allow(self, steps: int) -> None:
        """`steps` steps may run."""
        with self._changed:
            self._permitted = steps
            self._changed.notify_all()

    def step(
        self, slices: list[Slice], before_layer: Callable[[int], None], after_layer: Callable[[int], None]
    ) -> torch.Tensor:
        with self._changed:
            self._waits = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._permitted != 0)
            self._waits = False
            if self._permitted is not None:
                self._permitted -= 1
        return self._runner.step(slices, before_layer, after_layer)


class Ours:
    """An engine and its requests. A method returns the seconds it took."""

    def __init__(self, model: Path, threads: int, hbm_gib: float, max_batch: int, made_up: bool, avx2: bool) -> None:
        torch.set_num_threads(1)  # as in the worker: the kernels have their own threads
        torch.set_grad_enabled(False)
        settings, worker = KvSection(), WorkerSection(max_batch=max_batch)
        chunk = settings.chunk_tokens
        memory = host_memory(int(hbm_gib * 2**30) // GRANULE_BYTES * GRANULE_BYTES, GRANULE_BYTES)
        kernels = CpuKernels(library(more=AVX2_ONLY if avx2 else ()), threads)
        loaded = load_model(model, memory, "auto", "cpu", chunk, None, kernels.pack)
        pages = max(memory.free * GRANULE_BYTES // loaded.shape.piece_bytes, 1)
        kv = PagedKv.reserve(memory, loaded.shape, pages, Owner(Use.KV, "bench"))
        pool = PagePool(memory.free // kv.slab_granules, kv.pages_per_slab, loaded.shape.layers)
        table = LoadTable()
        loader = KvLoader(kv, table, lambda event: self._engine.inbox.put(event))
        salt = tenant_salt(b"bench" * 8, "t")
        self._executor = device = Executor(
            loaded.shape, kv, HbmCache(pool), table, loader, RealClock(), settings, lambda tenant: salt
        )
        self._gate = Gated(NativeRunner(loaded, kv, kernels))
        self._engine = NativeEngine(device, self._gate, NoText.load(model), loaded.eos_ids, "bench", worker)
        self._loop = DeviceLoop([self._engine])
        self._loop.on_crash = lambda error: os._exit(1)
        self._vocabulary = loaded.config.vocab_size
        self._made_up, self._threads, self.products = made_up, threads, kernels.products[0]
        self._filled = np.empty(0, np.uint8)
        self._count = 0
        self._live: list[str] = []
        self._frames: queue.SimpleQueue[tuple[float, set[str]]] = queue.SimpleQueue()
        loader.start()
        self._loop.start()

    def put(self, frame: StepFrame) -> None:
        """Receive a frame, in place of a gateway stream. Runs on the engine's thread."""
        if frame.failed:
            raise RuntimeError(str(frame.failed))
        speaking = {output.request_id for output in frame.outputs if output.tokens}
        if speaking:
            self._frames.put((time.perf_counter(), speaking))

    def _submit(self, tokens: int, max_tokens: int) -> str:
        self._count += 1
        sampling = Sampling(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
        ids = prompt(self._count, tokens, self._vocabulary)
        request = GenerateRequest(f"r{self._count}", "t", f"s{self._count}", "bench", sampling, prompt_tokens=ids)
        self._engine.inbox.put(Submit(request, ids, max_tokens, self))
        return request.request_id

    def prefill(self, tokens: int) -> float:
        """An uncached prompt, until its first token."""
        began = time.perf_counter()
        self._submit(tokens, 1)
        return self._frames.get(timeout=TIMEOUT_S)[0] - began

    def begin(self, batch: int, context: int) -> float:
        """Prefill a batch and stop before its next step."""
        began = time.perf_counter()
        if self._made_up:
            self._gate.shut()
            self._submit(1, 1)
            self._gate.close()  # the engine's thread is held in a step: this one may use the cache
            for number in range(self._count + 1, self._count + batch + 1):
                self._make_up(number, context)
            self._gate.open()
            self._frames.get(timeout=TIMEOUT_S)
        self._live = [self._submit(context, MOST_NEW_TOKENS) for _ in range(batch)]
        silent = set(self._live)
        while silent:
            ended, speaking = self._frames.get(timeout=TIMEOUT_S)
            silent -= speaking
        self._gate.close()
        return ended - began

    def _make_up(self, number: int, context: int) -> None:
        """Put synthetic KV of request `number`'s prompt into HBM. The engine must be held."""
        device, session = self._executor, SessionKey("t", f"s{number}")
        usable = (context - 1) // device.shape.chunk_tokens * device.shape.chunk_tokens
        ids = prompt(number, context, self._vocabulary)[:usable]
        for index, key in enumerate(chunk_keys(device.salt_of("t"), device.shape, ids)):
            if not device.cache.make_room(device.shape.layers, device.clock.now()):
                raise RuntimeError("the KV cache is too small; raise --kv-gib")
            block = device.cache.new_block(index, session, range(device.shape.layers))
            self._engine.core.state.back()
            for asked in self._engine.core.take():
                device.execute(asked)
            for page in block.pages:
                torch.from_numpy(device.kv.page_bytes_view(int(page))).view(device.kv.dtype).fill_(MADE_UP)
            block.ready[:], block.save = True, SaveState.BELOW
            device.cache.enter(block, key)

    def read(self, amount: int) -> float:
        """Read `amount` bytes of memory once with all threads (memchr for a byte that does not occur)."""
        if self._filled.nbytes < amount:
            self._filled = np.ones(amount, np.uint8)
        share = amount // self._threads
        places = [self._filled.ctypes.data + i * share for i in range(self._threads)]
        began = time.perf_counter()
        readers = [threading.Thread(target=LIBC.memchr, args=(place, 0, share)) for place in places]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        return time.perf_counter() - began

    def decode(self, steps: int) -> float:
        """`steps` steps of the whole batch, timed from the end of the step before them."""
        while not self._frames.empty():
            self._frames.get()
        self._gate.allow(steps + 1)
        ends = [self._frames.get(timeout=TIMEOUT_S) for _ in range(steps + 1)]
        if any(len(speaking) != len(self._live) for _, speaking in ends):
            raise RuntimeError("a sequence was left out of a step")
        return ends[-1][0] - ends[0][0]

    def end(self) -> float:
        """Cancel the batch and wait until the engine is idle."""
        for request_id in self._live:
            self._engine.inbox.put(Cancel(request_id))
        self._gate.open()
        while not self._engine.idle:
            time.sleep(0.01)
        while not self._frames.empty():
            self._frames.get()
        return 0.0


def main() -> None:
    settings = arguments()
    ours = Ours(
        Path(settings["model"]),
        settings["threads"],
        settings["kv_gib"] + WEIGHTS_GIB,
        settings["max_batch"],
        settings["made_up"],
        settings["avx2"],
    )
    does = {"prefill": ours.prefill, "begin": ours.begin, "decode": ours.decode, "end": ours.end, "read": ours.read}
    serve(does, {"our_products": ours.products})


if __name__ == "__main__":
    main()
