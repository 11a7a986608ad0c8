"""The tables of bench/gpu: ceilings, decode, prefill, loads, and TTFT by the tier of a session's cache."""

from __future__ import annotations

import functools
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from elastic import activation, circulation, driver_calls, granules, imaged
from rich.console import Console
from rich.table import Table
from setting import Setting, make

from loadtest.report import provenance, write_json
from worker.__main__ import SWITCH_S
from worker.devices.cuda.runner import CudaRunner
from worker.devices.runner import Slice

#: New tokens of a returning session.
NEW_TOKENS = 50
STEP_TOKENS = 2048


def measure(quick: bool, rehearse: bool, out: Path | None) -> int:
    """Measure, print, and write `out` if given. Returns the exit status."""
    sys.setswitchinterval(SWITCH_S)
    setting = make(rehearse, 0.002 if rehearse else 4.5 if not quick else 1.0)
    contexts = (16, 40) if rehearse else (4096,) if quick else (4096, 16_384, 32_768)
    batches = (1, 2) if rehearse else (1, 8, 32) if quick else (1, 8, 32, 64)
    tokens = (16, 32) if rehearse else (512, 2048) if quick else (512, 2048, 8192)
    rounds = 1 if rehearse else 3 if quick else 7
    runner = CudaRunner(
        setting.model, setting.kv, setting.queue, setting.fence, STEP_TOKENS if not rehearse else 64, max(batches)
    )
    bench = Bench(setting, runner, rounds)
    ceilings = {"copy_gb_s": bench.copy_ceiling(), "matrix_tflop_s": bench.matrix_ceiling()}
    figures: dict[str, Any] = {
        "ceilings": ceilings,
        "decode": [
            bench.decode(b, n, ceilings["copy_gb_s"])
            for n in (128 if not rehearse else 8, contexts[0])
            for b in batches
        ],
        "prefill": [bench.prefill(n, ceilings["matrix_tflop_s"]) for n in tokens],
        "loads": bench.loads(),
        "first_token": [bench.first_token(n) for n in contexts],
        "granules": granules(setting, rounds) | driver_calls(setting, rounds),
    }
    decodes = {f"decode, batch {b}, context {n}": bench.slices(b, 1, n) for b in batches[1:] for n in contexts[:1]}
    steps = {name: functools.partial(bench.step, slices) for name, slices in decodes.items()}
    steps |= {f"prefill of {n}": functools.partial(bench.prompt, 0, n) for n in tokens if n <= STEP_TOKENS}
    with imaged(setting) as image:
        figures["activation"] = activation(setting, image, lambda: bench.prompt(0, tokens[0]), rounds)
        figures["circulation"] = circulation(setting, image, steps, rounds)
    console = Console()
    console.print(figures["ceilings"])
    for name, rows in figures["circulation"]["steps"].items():
        table = Table(*rows[0], title=f"{name}; a copy takes {figures['circulation']['copy_s'] * 1e3:.2f} ms")
        for row in rows:
            table.add_row(*(f"{v:.4g}" for v in row.values()))
        console.print(table)
    for name in ("granules", "activation"):
        console.print(name, {what: float(f"{value:.3g}") for what, value in figures[name].items()})
    for name in ("decode", "prefill", "loads", "first_token"):
        rows = figures[name] if isinstance(figures[name], list) else [figures[name]]
        table = Table(*rows[0], title=name)
        for row in rows:
            table.add_row(*(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()))
        console.print(table)
    if rehearse:
        console.print("a rehearsal: these figures mean nothing")
    if out is not None:
        device = torch.cuda.get_device_name()
        units = {
            "s": "seconds",
            "us": "microseconds",
            "gb_s": "10^9 bytes a second",
            "tflop_s": "10^12 operations a second",
            "share": "of the ceiling of this run",
        }
        write_json(
            out,
            provenance()
            | {"device": device, "model": "8B shape, random bfloat16 weights", "units": units, "figures": figures},
        )
    return 0


class Bench:
    """Measurements on one setting; each is the median of `rounds`."""

    def __init__(self, setting: Setting, runner: CudaRunner, rounds: int) -> None:
        self.s, self.runner, self.rounds = setting, runner, rounds
        self.pages = len(setting.kv.mapped_slabs) * setting.kv.pages_per_slab

    def seconds(self, work: Callable[[], object]) -> float:
        """Median seconds of `work`, after two uncounted rounds: the first compiles, the second may capture."""
        taken = []
        for n in range(self.rounds + 2):
            self.finish()
            began = time.perf_counter()
            work()
            self.finish()
            if n >= 2:
                taken.append(time.perf_counter() - began)
        return statistics.median(taken)

    def finish(self) -> None:
        """Wait until the device is idle."""
        if self.s.driver is not None:
            self.s.driver.settle()

    def slices(self, batch: int, count: int, start: int) -> list[Slice]:
        """`batch` sequences, on separate pages as far as the cache suffices."""
        layers, chunks = self.s.config.layers, -(-(start + count) // self.s.kv.shape.chunk_tokens)
        each = np.arange(layers * chunks, dtype=np.int64).reshape(layers, chunks)
        return [Slice([1] * count, start, (each + n * layers * chunks) % self.pages, True) for n in range(batch)]

    def step(self, slices: list[Slice]) -> torch.Tensor:
        return self.runner.step(slices, lambda layer: None, lambda layer: None)

    # ---- ceilings ----------------------------------------------------------------------------------------------
    def copy_ceiling(self) -> float:
        """GB/s of a large copy within the device, counting bytes read and written."""
        a = torch.empty((4 << 30) if self.s.driver else (1 << 20), dtype=torch.uint8, device=self.s.queue.device)
        a.random_(256)
        b = torch.empty_like(a)
        return 2 * a.numel() / self.seconds(lambda: b.copy_(a)) / 1e9

    def matrix_ceiling(self) -> float:
        """TFLOP/s of the library's product of large random matrices."""
        n = 8192 if self.s.driver else 64
        a, b = (torch.randn(n, n, dtype=self.s.model.dtype, device=self.s.queue.device) for _ in range(2))
        return 2 * n**3 / self.seconds(lambda: a @ b) / 1e12

    # ---- compute -----------------------------------------------------------------------------------------------
    def decode(self, batch: int, context: int, copy_gb_s: float) -> dict[str, Any]:
        """One token of each sequence after `context`. share: rate of reading weights and KV over the copy's rate."""
        slices, s = self.slices(batch, 1, context), self.s
        seconds = self.seconds(lambda: self.step(slices))
        kv = batch * context * s.kv.shape.layers * s.kv.page_bytes / s.kv.shape.chunk_tokens
        share = (s.weight_bytes + kv) / seconds / 1e9 / copy_gb_s
        return {"batch": batch, "context": context, "tokens_s": batch / seconds, "step_s": seconds, "share": share}

    def prefill(self, count: int, matrix_tflop_s: float) -> dict[str, Any]:
        """A prompt in steps of STEP_TOKENS. share: rate of the operations in layers and attention, over the product's
        rate."""
        seconds, s = self.seconds(lambda: self.prompt(0, count)), self.s
        head = s.config.vocab_size * s.config.hidden_size * s.model.dtype.itemsize
        per_token = 2 * (s.weight_bytes - head) / s.model.dtype.itemsize
        attention = 2 * count**2 * s.config.heads * s.config.head_dim * s.config.layers
        share = (per_token * count + attention) / seconds / 1e12 / matrix_tflop_s
        return {"tokens": count, "tokens_s": count / seconds, "seconds": seconds, "share": share}

    def prompt(self, start: int, end: int) -> None:
        """Compute tokens `start` to `end` of one sequence, with logits of the last."""
        whole = self.slices(1, 1, end - 1)[0].pages
        for at in range(start, end, STEP_TOKENS):
            upto = min(at + STEP_TOKENS, end)
            chunks = -(-upto // self.s.kv.shape.chunk_tokens)
            self.step([Slice([1] * (upto - at), at, whole[:, :chunks], upto == end)])

    # ---- loads -------------------------------------------------------------------------------------------------
    def loads(self) -> dict[str, Any]:
        """GB/s of pieces from the arena in the loader's runs, against one copy of the same bytes from page-locked
        memory."""
        kv, device = self.s.kv, self.s.queue.device
        count = min(self.s.arena.nbytes // kv.page_bytes, self.pages)
        order = np.random.default_rng(0).permutation(count)
        pieces = self.seconds(lambda: self.bring(np.arange(count), order * kv.page_bytes))
        down = self.seconds(lambda: self.s.copier.save(self.s.arena, order * kv.page_bytes, np.arange(count)))
        bare = torch.empty(count * kv.page_bytes, dtype=torch.uint8, pin_memory=self.s.driver is not None)
        target = torch.empty_like(bare, device=device, pin_memory=False)
        alone = self.seconds(lambda: target.copy_(bare, non_blocking=True))
        total = count * kv.page_bytes
        rates = {
            "load_gb_s": total / pieces / 1e9,
            "save_gb_s": total / down / 1e9,
            "bare_copy_gb_s": total / alone / 1e9,
        }
        return {"piece_bytes": kv.page_bytes, "pieces": int(count), **rates, "share": alone / pieces}

    def bring(self, pages: np.ndarray, offsets: np.ndarray) -> None:
        """Load pieces in runs and wait for them."""
        run = max(1, self.s.copier.run_bytes // self.s.kv.page_bytes)
        for at in range(0, len(pages), run):
            self.s.copier.load(self.s.arena, offsets[at : at + run], pages[at : at + run])
        self.s.copier.settle()

    def first_token(self, context: int) -> dict[str, Any]:
        """Seconds until the logits of NEW_TOKENS after `context`: cache in HBM, in DRAM loaded layer-wise, or
        recomputed."""
        new = NEW_TOKENS if self.s.driver else 5
        [slice_] = self.slices(1, new, context)
        held = self.seconds(lambda: self.step([slice_]))
        loaded = self.seconds(lambda: self.step_while_loading(slice_, context))
        computed = self.seconds(lambda: self.prompt(0, context + new))
        ratios = {"dram_over_hbm": loaded / held, "recompute_over_dram": computed / loaded}
        return {"context": context, "hbm_s": held, "dram_s": loaded, "recompute_s": computed} | ratios

    def step_while_loading(self, slice_: Slice, context: int) -> None:
        """Run a step while a thread queues the layers' pieces in order, like the loader; each layer waits for its
        pieces."""
        kv, layers = self.s.kv, self.s.config.layers
        chunks = context // kv.shape.chunk_tokens
        queued = [threading.Event() for _ in range(layers)]
        room = self.s.arena.nbytes // kv.page_bytes

        def bring() -> None:
            run = max(1, self.s.copier.run_bytes // kv.page_bytes)
            for layer in range(layers):
                for at in range(0, chunks, run):
                    pages = slice_.pages[layer, at : min(at + run, chunks)]
                    self.s.copier.load(self.s.arena, pages % room * kv.page_bytes, pages)
                queued[layer].set()

        bringing = threading.Thread(target=bring)
        bringing.start()
        self.runner.step([slice_], lambda layer: queued[layer].wait() and None, lambda layer: None)
        bringing.join()
