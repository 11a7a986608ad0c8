"""What memory that changes hands costs on the device: granules, and a model's weights from an image in host memory."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from setting import GRANULE, Setting

from worker.core.granules import Owner, Use
from worker.memory.cuda_memory import cuda_memory
from worker.memory.cuda_streams import CudaMark
from worker.memory.device_memory import host_memory
from worker.models.circulating import Circulation, no_mark, time_of_copy
from worker.models.filling import Filling
from worker.models.image import HostImage, image_of

#: Granules that one call maps.
_TOGETHER = 64
#: Threads that copy weights, as in `worker.serving`.
_THREADS = 2
#: Wait after a model has left, in seconds: its range is unmapped then (`worker.memory.unmapping`).
_UNMAPPED_S = 1.5
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


def driver_calls(s: Setting, rounds: int) -> dict[str, float]:
    """Microseconds a granule of the driver's calls behind `granules`, _TOGETHER at a time."""
    driver = s.driver
    if driver is None:
        return {}
    taken, address = dict[str, list[float]](), driver.reserve(_TOGETHER * GRANULE)
    places = [address + n * GRANULE for n in range(_TOGETHER)]

    def timed(name: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        found = work()
        taken.setdefault(f"{name}_us", []).append((time.perf_counter() - began) / _TOGETHER * 1e6)
        return found

    for n in range(2 * rounds):
        handles = timed("create", lambda: [driver.create(GRANULE) for _ in places])
        timed("map", lambda handles=handles: [driver.map(p, GRANULE, h) for p, h in zip(places, handles, strict=True)])
        timed("allow", lambda: driver.allow(address, _TOGETHER * GRANULE))
        timed("zero", lambda: driver.zero(address, _TOGETHER * GRANULE))
        if n % 2:
            timed("unmap_together", lambda: driver.unmap(address, _TOGETHER * GRANULE))
        else:
            timed("unmap_each", lambda: [driver.unmap(p, GRANULE) for p in places])
        timed("release", lambda handles=handles: [driver.release(h) for h in handles])
    driver.free(address, _TOGETHER * GRANULE)
    return {name: statistics.median(times) for name, times in taken.items()}


@contextlib.contextmanager
def imaged(s: Setting) -> Iterator[HostImage]:
    """The model's image in host memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
        image = image_of(Path(shared), b"bench", s.model.spans, 1 << 40, s.lock)
        assert image is not None, "there is no room for the image"
        yield image
        image.close()


def activation(s: Setting, image: HostImage, first_token: Callable[[], object], rounds: int) -> dict[str, float]:
    """Seconds until a model's weights are here, and until `first_token` has returned, by the memory they get; of
    `first_token` when all are here; and until they have gone. product: of another model's matrix product, meanwhile
    and alone."""
    found: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], object]) -> None:
        began = time.perf_counter()
        work()
        found.setdefault(f"{name}_s", []).append(time.perf_counter() - began)

    a = torch.randn(2048, 2048, dtype=s.model.dtype, device=s.queue.device)
    b = torch.empty_like(a)

    def neighbour(still: Callable[[], bool]) -> list[float]:
        """Seconds of each matrix product, launched and waited for, while `still`."""
        seen = []
        with s.queue.computing():
            while still() or not seen:
                began = time.perf_counter()
                torch.mm(a, a, out=b)
                s.queue.finish()
                seen.append(time.perf_counter() - began)
        return seen

    def bring(work: Callable[[Filling], object]) -> None:
        s.model.take()
        filling = Filling(s.model.spans, image, lambda: None, copy=s.copy, threads=_THREADS)
        s.model.layers.before_use = lambda layer: filling.wait(layer + 1)
        filling.wait(1)
        work(filling)
        filling.wait(len(filling) - 1)
        s.model.layers.before_use = lambda layer: None

    products = dict[str, list[float]]()
    for n in range(rounds + 1):
        if n == 1:
            found.clear()  # the first round warms up
        for name, keep in (("new", False), ("warm", True)):
            for what, work in (("weights", lambda filling: None), ("first_token", lambda filling: first_token())):
                timed(f"gone_{name}", lambda keep=keep: s.model.unload(keep=keep))
                time.sleep(_UNMAPPED_S)
                timed(f"{what}_{name}", lambda work=work: bring(work))
        s.model.unload(keep=True)
        bring(lambda filling: products.setdefault("meanwhile", []).extend(neighbour(lambda: not filling.over)))
        timed("active", first_token)
    until = time.perf_counter() + 0.3
    products["alone"] = neighbour(lambda: time.perf_counter() < until)
    median = {name: statistics.median(times) for name, times in found.items()}
    size = sum(span.packed_bytes for span in s.model.spans)
    rates = {
        "gb": size / 1e9,
        "weights_gb_s": size / median["weights_warm_s"] / 1e9,
        "over_active": median["first_token_warm_s"] / median["active_s"],
    }
    for when, seen in products.items():
        rates[f"product_{when}_p50_s"] = statistics.median(seen)
        rates[f"product_{when}_p99_s"] = sorted(seen)[len(seen) * 99 // 100]
    return median | rates


def circulation(s: Setting, image: HostImage, steps: dict[str, Callable[[], object]], rounds: int) -> dict[str, Any]:
    """Seconds of a layer's copy, and of each of `steps` with all layers here and with some lent: their median, and the
    mean time that it waited for layers."""
    layers = s.config.layers
    made = Circulation(s.model, image, s.copy, (lambda: CudaMark(s.queue.stream).wait) if s.driver else no_mark)
    found = dict[str, list[dict[str, float]]]()
    for name, step in steps.items():
        rows = found.setdefault(name, [])
        for lent, slots in ((0, 0), (1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (4, 2), (8, 2), (0, 0)):
            if lent + slots > layers:
                continue
            made.change(lent, slots)
            taken = list[float]()
            for n in range(rounds + 3):
                waited_s, began = made.waited_s, time.perf_counter()
                step()
                taken.append(time.perf_counter() - began if n >= 3 else 0.0)
                waited_s = made.waited_s - waited_s
            rows.append({"lent": lent, "slots": slots, "step_s": statistics.median(taken[3:]), "waited_s": waited_s})
    made.close()
    s.model.layers.before_use = s.model.layers.after_use = lambda layer: None
    return {"copy_s": time_of_copy(s.model, image, s.copy), "layers": layers, "steps": found}
