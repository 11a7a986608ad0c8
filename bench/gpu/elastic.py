"""What memory that changes hands costs on the device: granules, and a model's weights from an image in host memory."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from setting import GRANULE, Setting

from worker.core.granules import Owner, Use
from worker.memory.cuda_memory import cuda_memory
from worker.memory.device_memory import host_memory
from worker.models.filling import Filling
from worker.models.image import image_of

#: Granules that one call maps.
_TOGETHER = 64
#: Threads that copy weights, as in `worker.serving`.
_THREADS = 2
_OWNER = Owner(Use.KV, "bench")


def granules(s: Setting, rounds: int) -> dict[str, float]:
    """Microseconds a granule of 2 MiB, _TOGETHER in a call: mapped with new memory, with memory of another owner, and
    unmapped."""
    total = _TOGETHER * GRANULE
    memory = host_memory(total, GRANULE) if s.driver is None else cuda_memory(s.driver, total, GRANULE, s.queue.device)
    span, taken = memory.reserve(total, _OWNER), dict[str, list[float]]()

    def timed(name: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        found = work()
        taken.setdefault(name, []).append(time.perf_counter() - began)
        return found

    for _ in range(rounds):
        held = memory.take(_TOGETHER, _OWNER)
        timed("map_new_us", lambda held=held: span.map(0, held))
        held = timed("unmap_us", lambda: span.unmap(0, _TOGETHER))
        timed("map_again_us", lambda held=held: span.map(0, held))
        memory.give(span.unmap(0, _TOGETHER))
    memory.close()
    return {name: statistics.median(times) / _TOGETHER * 1e6 for name, times in taken.items()}


def activation(s: Setting, first_token: Callable[[], object], rounds: int) -> dict[str, float]:
    """Seconds until a model's weights are here, and until `first_token` has returned, by the memory they get; and of
    `first_token` when all are here."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
        began = time.perf_counter()
        image = image_of(Path(shared), b"bench", s.model.spans, 1 << 40, s.lock)
        made_s = time.perf_counter() - began
        assert image is not None, "there is no room for the image"
        for n in range(rounds + 1):
            for name, keep in (("new", False), ("warm", True)):
                for what, compute in (("weights", False), ("first_token", True)):
                    s.model.unload(keep=keep)
                    began = time.perf_counter()
                    s.model.map()
                    mapped_s = time.perf_counter() - began
                    filling = Filling(s.model.spans, image, lambda: None, copy=s.copy, threads=_THREADS)
                    s.model.layers.before_use = lambda layer, filling=filling: filling.wait(layer + 1)
                    if compute:
                        filling.wait(1)
                        first_token()
                    else:
                        filling.wait(len(filling) - 1)
                    if n:  # the first round warms up
                        found.setdefault(f"{what}_{name}_s", []).append(time.perf_counter() - began)
                        found.setdefault(f"map_{name}_s", []).append(mapped_s)
                    filling.wait(len(filling) - 1)
                    s.model.layers.before_use = lambda layer: None
            began = time.perf_counter()
            first_token()
            if n:
                found.setdefault("active_s", []).append(time.perf_counter() - began)
        image.close()
    median = {name: statistics.median(times) for name, times in found.items()}
    size = sum(span.packed_bytes for span in s.model.spans)
    rates = {
        "gb": size / 1e9,
        "weights_gb_s": size / median["weights_warm_s"] / 1e9,
        "over_active": median["first_token_warm_s"] / median["active_s"],
    }
    return {"image_made_s": made_s} | median | rates
