"""A start with 100,000 chunk files on the SSD: lists their names and fills the index."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import numpy as np
from ground import KEYS, arena
from pairs import Figure, Pair

from contracts.kv import KvShape
from kvstore.core import events as ev
from kvstore.core.store import Store
from kvstore.tiers.file_io import ThreadFileIo
from kvstore.tiers.format import Header, encode_header, header_bytes, object_bytes, raw_layout
from kvstore.tiers.ssd import SsdTier

#: Files of 12 KiB: two layers of 4 KiB pieces.
SMALL = KvShape.of_heads(b"small".ljust(32, b"."), 2, 1, 16, 32, "float32")
_DROP = Path("/proc/sys/vm/drop_caches")


def measure(scratch: Path, quick: bool) -> list[Pair | Figure]:
    """Cold where the page cache may be dropped, then warm."""
    count = 20_000 if quick else 100_000
    root = scratch / "recovery"
    found: list[Pair | Figure] = []
    with arena(1 << 20) as memory:
        tier = SsdTier(root, memory, KEYS, ThreadFileIo(memory), ThreadFileIo(memory))
        _fill(tier, count)
        os.sync()
        for name in ("cold", "warm"):
            if name == "cold":
                try:
                    _DROP.write_text("3\n")
                except OSError:
                    continue
            store = Store("node-0", 1 << 30, write_back_limit_bytes=1 << 30)
            begun = time.perf_counter()
            recovery = tier.recover()
            read_s = time.perf_counter() - begun
            store.handle(ev.Recovered(recovery.copies, recovery.listed))
            seconds = time.perf_counter() - begun
            assert recovery.chunks == count and not recovery.deleted
            note = (
                f"{object_bytes(SMALL) >> 10} KiB each; {count / seconds:,.0f} files/s, of it "
                f"{seconds - read_s:.2f} s for the index"
            )
            found.append(Figure(f"recovery of {count:,} chunk files, {name}", round(seconds, 2), "s", note=note))
        tier.close()
    shutil.rmtree(root)
    return found


def _fill(tier: SsdTier, count: int) -> None:
    """Write the files in the store's format, without group commits."""
    random = np.random.default_rng(3)
    folder = tier.path(bytes(32), SMALL.fingerprint).parent
    folder.mkdir(parents=True)
    body = random.bytes(object_bytes(SMALL) - header_bytes(SMALL.layers))
    for i in range(count):
        key = random.bytes(32)
        tier.path(key, SMALL.fingerprint).write_bytes(
            encode_header(KEYS, Header(key, SMALL, raw_layout(SMALL), (i, i + 1))) + body
        )
