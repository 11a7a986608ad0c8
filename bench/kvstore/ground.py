"""What the measurements share: model shapes, an arena of random bytes, chunks in it, bare NIXL agents."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from contracts.kv import KvShape
from kvstore.core.instructions import FetchPiece, WriteSsd
from kvstore.tiers import nixl
from kvstore.tiers.arena import Arena
from kvstore.tiers.cluster_keys import ClusterKeys

#: The 131 M parameter model of the other benchmarks: 12 layers, pieces of 64 KiB, chunks of 768 KiB.
SHAPE = KvShape.of_heads(b"131m".ljust(32, b"."), 12, 4, 64, 64, "bfloat16")
#: An 8 B parameter model of the Llama family: 32 layers, pieces of 256 KiB, chunks of 8 MiB.
SHAPE_8B = KvShape.of_heads(b"8b".ljust(32, b"."), 32, 8, 128, 64, "bfloat16")
GB = 1e9
KEYS = ClusterKeys(b"secret of the benches")
# Must precede any agent; without it the store does not use NIXL.
nixl.set_environment("lo")
#: Keeps agents and their arenas alive until the process ends: an arena must not be freed before its agent.
_KEPT: list[Any] = []


@contextmanager
def arena(size_bytes: int, name: str = "arena") -> Iterator[Arena]:
    """An arena of random bytes on the tmpfs."""
    made = Arena(Path("/dev/shm") / f"upbeat-bench-{os.getpid()}-{name}.arena", size_bytes)
    _KEPT.append(made)
    block = np.random.default_rng(1).bytes(min(size_bytes, 64 << 20))
    for start in range(0, size_bytes, len(block)):
        end = min(size_bytes, start + len(block))
        made.view[start:end] = block[: end - start]
    try:
        yield made
    finally:
        made.close()


def chunks(of: Arena, shape: KvShape, count: int, tag: int = 0) -> list[WriteSsd]:
    """`count` chunks with distinct keys, side by side from the arena's start."""
    size, made = shape.piece_bytes, []
    for i in range(count):
        offsets = tuple(i * shape.chunk_bytes + layer * size for layer in range(shape.layers))
        key = np.random.default_rng([tag, i]).bytes(32)
        made.append(WriteSsd(key, shape, offsets, tuple(of.checksum(o, size) for o in offsets)))
    return made


def bands(
    writes: Sequence[WriteSsd], layers: int, base: int = 0, sums: Mapping[bytes, Sequence[int]] | None = None
) -> list[tuple[FetchPiece, ...]]:
    """Reads of `layers` neighbouring layers each, in the store's order: the lowest layers of all chunks first. sums: by
    chunk, of the copy that is read; by default the arena's."""
    return [
        tuple(
            FetchPiece(w.key, layer, base + w.offsets[layer], 0, (sums[w.key] if sums else w.checksums)[layer])
            for layer in range(first, first + layers)
        )
        for first in range(0, writes[0].shape.layers, layers)
        for w in writes
    ]


def bare_agent(name: str, backend: str, memory: Arena) -> Any:
    """A NIXL agent with one backend and the arena registered."""
    api = nixl.load()
    agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[backend]))
    agent.register_memory([(memory.address, memory.size_bytes, 0, "")], "DRAM", backends=[backend])
    _KEPT.append(agent)
    return agent


def forget_page_cache(paths: Sequence[Path]) -> None:
    """Drop the files from the page cache."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
