"""What a granule of the CPU device costs: to map, to unmap, and to hand from model to model."""

from __future__ import annotations

import time
from collections.abc import Callable

from contracts.kv import KvShape
from worker.core.granules import Owner, Use
from worker.memory.device_memory import host_memory
from worker.memory.paged_kv import PagedKv

GRANULE = 2 << 20
#: Granules that are timed together.
_TOGETHER = 64


def measure(rounds: int) -> dict[str, list[float]]:
    """Microseconds a granule, a value a round, by what is done with it. Slabs are single granules."""
    memory = host_memory(_TOGETHER * GRANULE, GRANULE)
    shape = KvShape.of_heads(bytes(32), 12, 4, 64, 64, "bfloat16")
    one, other = (PagedKv(memory.reserve(_TOGETHER * GRANULE, Owner(Use.KV, name)), shape) for name in ("one", "other"))
    slabs = range(one.slab_count)
    assert len(slabs) == _TOGETHER
    found: dict[str, list[float]] = {}

    def timed(name: str, each: Callable[[int], object]) -> None:
        began = time.perf_counter()
        for slab in slabs:
            each(slab)
        found.setdefault(name, []).append((time.perf_counter() - began) / _TOGETHER * 1e6)

    def hand_over(slab: int) -> None:
        one.unmap_slab(slab, keep=True)
        other.map_slab(slab)

    for _ in range(rounds):
        timed("map, fresh", one.map_slab)
        timed("unmap", lambda slab: one.unmap_slab(slab, keep=True))
        timed("map, warm", one.map_slab)
        timed("hand over", hand_over)
        timed("unmap, back to the system", other.unmap_slab)
        timed("prepare in idle time", lambda _: memory.prepare())
        timed("map, prepared", one.map_slab)
        for slab in slabs:
            one.unmap_slab(slab)
    memory.close()
    return found
