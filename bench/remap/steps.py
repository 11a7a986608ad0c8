"""What a step costs while layers lend their memory, in this process: copies are real, and on another thread."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.remap.setting import SHAPE
from loadtest.random_model import SHAPES, make_random_model
from runtime.model_config import load_config
from worker.core.granules import Owner, Use
from worker.core.lending import Lending
from worker.core.pace import Pace
from worker.devices.cpu.native_runner import NativeRunner
from worker.devices.runner import Slice
from worker.kernels.choice import choose_kernels
from worker.memory.device_memory import host_memory
from worker.memory.paged_kv import PagedKv
from worker.models.circulating import Circulation, time_of_copy
from worker.models.filling import host_copy
from worker.models.image import image_of
from worker.models.load import load_model

CHUNK, CONTEXT = 64, 448


def measure(threads: int, batches: Sequence[int], lents: Sequence[int], rounds: int) -> dict[str, Any]:
    """Median seconds of decode steps, by batch, layers lent and slots, interleaved with steps with all layers here; and
    what the controller would choose, from the time of a copy and of these steps."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as scratch:
        config, dtype = SHAPES[SHAPE]
        directory = make_random_model(Path(scratch) / "model", config, 0, dtype)
        kernels = choose_kernels("native", load_config(directory), CHUNK, threads)
        assert kernels is not None
        memory = host_memory(2 << 30, 2 << 20)
        model = load_model(directory, memory, dtype, "cpu", CHUNK, None, kernels.pack)
        layers, chunks = len(model.layers), -(-CONTEXT // CHUNK)
        kv = PagedKv.reserve(memory, model.shape, layers * chunks * max(batches), Owner(Use.KV, "bench"))
        for slab in range(kv.slab_count):
            kv.map_slab(slab)
        runner = NativeRunner(model, kv, kernels)
        image = image_of(Path(scratch), b"bench", model.spans, 1 << 40)
        assert image is not None
        copy_s = time_of_copy(model, image, host_copy, 10)
        circulation = Circulation(model, image, host_copy)
        rows: list[dict[str, Any]] = []
        for batch in batches:
            slices = _slices(batch, layers, chunks)

            def step(slices: list[Slice] = slices) -> float:
                began = time.perf_counter()
                runner.step(slices, lambda layer: None, lambda layer: None)
                return time.perf_counter() - began

            found: dict[tuple[int, int], list[float]] = {}
            for _ in range(rounds):
                for lent, slots in [(0, 0), *((lent, slots) for lent in lents for slots in (1, 2))]:
                    circulation.change(lent, slots)
                    step(), step()
                    found.setdefault((lent, slots), []).extend(step() for _ in range(3))
            alone_s = statistics.median(found[0, 0])
            rule = Lending(layers, 1, copy_s, 1.0, layers, Pace(decode_token_s=alone_s))
            chosen = [rule.slots_for(lent, 1) for lent in lents]
            rows += [
                {
                    "batch": batch,
                    "lent": lent,
                    "one_slot_s": statistics.median(found[lent, 1]),
                    "two_slots_s": statistics.median(found[lent, 2]),
                    "alone_s": alone_s,
                    "slots_by_rule": slots,
                }
                for lent, slots in zip(lents, chosen, strict=True)
            ]
        circulation.change(0, 0)
        circulation.close()
        image.close()
    return {"threads": threads, "copy_s": copy_s, "layer_bytes": model.spans[1].packed_bytes, "rows": rows}


def _slices(batch: int, layers: int, chunks: int) -> list[Slice]:
    """Sequences of `CONTEXT` tokens, each on its own pages."""
    pages = np.arange(batch * layers * chunks, dtype=np.int64).reshape(batch, layers, chunks)
    return [Slice([1], CONTEXT - 1, each, True) for each in pages]
