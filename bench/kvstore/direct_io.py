"""Where O_DIRECT pays: cold reads and durable writes of bare NIXL POSIX with and without it, by transfer size."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path

from ground import GB, arena, bare_agent, forget_page_cache
from pairs import Figure, Pair, compare

from kvstore.tiers.arena import Arena
from kvstore.tiers.file_io import direct_works

SIZES = (64 << 10, 192 << 10, 768 << 10, 4 << 20)
_DEPTH = 16


def measure(scratch: Path, quick: bool) -> list[Pair | Figure]:
    """Each repetition moves 96 MiB (48 if quick). `ours` uses O_DIRECT, the other the page cache."""
    if not direct_works(scratch):
        return []
    total, repetitions = (48 << 20, 3) if quick else (96 << 20, 9)
    found: list[Pair | Figure] = []
    with arena(total) as memory:
        agent = bare_agent("direct", "POSIX", memory)
        path = scratch / "file"
        for size in SIZES:
            for operation in ("WRITE", "READ"):
                found.append(
                    compare(
                        "O_DIRECT against the page cache: "
                        f"{'cold reads' if operation == 'READ' else 'durable writes'} of {size >> 10} KiB",
                        partial(_move, agent, memory, path, operation, size, total, True),
                        partial(_move, agent, memory, path, operation, size, total, False),
                        total / GB,
                        "GB/s",
                        repetitions,
                        note=f"bare NIXL POSIX, {_DEPTH} under way",
                    )
                )
        path.unlink()
    return found


def _move(agent: object, memory: Arena, path: Path, operation: str, size: int, total: int, direct: bool) -> float:
    if operation == "READ":
        forget_page_cache([path])
    else:
        path.unlink(missing_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0), 0o600)
    registered = agent.register_memory([(0, total, fd, "")], "FILE", backends=["POSIX"])
    begun = time.perf_counter()
    if operation == "WRITE":
        os.ftruncate(fd, total)
    running = []
    for start in range(0, total, size):
        length = min(size, total - start)
        local = agent.get_xfer_descs([(memory.address + start, length, 0)], "DRAM")
        remote = agent.get_xfer_descs([(start, length, fd)], "FILE")
        handle = agent.initialize_xfer(operation, local, remote, "direct")
        if agent.transfer(handle) == "ERR":
            raise OSError("bare NIXL failed")
        running.append(handle)
        while len(running) >= _DEPTH:
            running = _pending(agent, running)
    while running:
        running = _pending(agent, running)
    if operation == "WRITE":
        os.fdatasync(fd)
    seconds = time.perf_counter() - begun
    agent.deregister_memory(registered)
    os.close(fd)
    return seconds


def _pending(agent: object, running: list) -> list:
    pending = []
    for handle in running:
        state = agent.check_xfer_state(handle)
        if state == "ERR":
            raise OSError("bare NIXL failed")
        if state == "PROC":
            pending.append(handle)
        else:
            handle.release()
    return pending
