"""The core with a million chunks: processor time of each operation and bytes per chunk."""

from __future__ import annotations

import gc
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ground import SHAPE
from pairs import Figure, Pair

from contracts.ids import SessionKey
from contracts.kv import Manifest
from kvstore.core import events as ev
from kvstore.core import instructions as do
from kvstore.core.store import Store

SESSION_CHUNKS = 64


def measure(scratch: Path, quick: bool) -> list[Pair | Figure]:
    """Measures in a child process, so that its memory holds nothing else."""
    count, sessions = (200_000, 64) if quick else (1_000_000, 256)
    command = [sys.executable, __file__, str(count), str(sessions)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [Figure(**fields) for fields in json.loads(done.stdout)]


def _measure(count: int, sessions: int) -> list[Figure]:
    process = psutil.Process()
    order = random.Random(1)
    keys = [order.randbytes(32) for _ in range(count)]
    sums = [tuple(order.getrandbits(64) for _ in range(SHAPE.layers)) for _ in range(1000)]
    arena_bytes = sessions * SESSION_CHUNKS * SHAPE.chunk_bytes
    store = Store("node-0", arena_bytes, write_back_limit_bytes=1 << 30)
    copies = [ev.FoundCopy(key, SHAPE, tuple(s ^ i for s in sums[i % 1000])) for i, key in enumerate(keys)]
    gc.collect()
    before = process.memory_info().rss
    begun = time.process_time()
    store.handle(ev.Recovered(copies))
    insert_s = time.process_time() - begun
    record_bytes = (process.memory_info().rss - before) / count
    del copies
    gc.collect()
    at = f"{count:,} chunks of {SHAPE.layers} pieces"
    found = [
        Figure("recovery: a chunk's header into the index", round(insert_s / count * 1e6, 2), "us", note=at),
        Figure("a chunk's record, with its checksums", round(record_bytes), "bytes", note=at),
    ]
    asked = [order.choice(keys) for _ in range(100_000)]
    begun = time.process_time()
    for key in asked:
        store.index.chunks[key]
    found.append(Figure("lookup by key", round((time.process_time() - begun) / len(asked) * 1e6, 3), "us", note=at))

    groups = [keys[i * SESSION_CHUNKS : (i + 1) * SESSION_CHUNKS] for i in range(count // SESSION_CHUNKS)]
    times = []
    for n, group in enumerate(groups[: max(1000, sessions * 2)]):
        manifest = Manifest(SessionKey("t", f"s-{n}"), "m", SHAPE.fingerprint, group, 64 * SESSION_CHUNKS, float(n))
        begun = time.process_time()
        store.handle(ev.ManifestsListed([manifest], 0.0))
        times.append(time.process_time() - begun)
    found.append(
        Figure(f"a manifest of {SESSION_CHUNKS} chunks", round(statistics.median(times) * 1e6, 1), "us", note=at)
    )

    store.handle(ev.ShapesDeclared("w", [SHAPE], 0.0))
    begins, pieces = [], []
    for n in range(sessions):
        first, all_of_it = _load(store, groups[n], n)
        begins.append(first)
        pieces.append(all_of_it)
    piece_count = SESSION_CHUNKS * SHAPE.layers
    note = f"{at}; the arena is filled from the SSD with {sessions * SESSION_CHUNKS:,} chunks"
    found.append(
        Figure(f"begin a load of {SESSION_CHUNKS} chunks", round(statistics.median(begins) * 1e3, 2), "ms", note=note)
    )
    found.append(
        Figure(
            "a load, from begin to end, a piece",
            round(statistics.median(pieces) / piece_count * 1e6, 1),
            "us",
            note=note,
        )
    )
    full = []
    for n in range(sessions, sessions + sessions // 2):
        full.append(_load(store, groups[n], n)[1])
    note = (
        f"{at}; the arena is full with {sessions * SESSION_CHUNKS * SHAPE.layers:,} pieces, each of which must "
        "be displaced"
    )
    value = (statistics.median(full) - statistics.median(pieces)) / piece_count
    found.append(Figure("choosing and freeing a victim, a piece", round(value * 1e6, 1), "us", note=note))
    return found


def _load(store: Store, keys: list[bytes], number: int) -> tuple[float, float]:
    """Seconds until a load has begun, and until all its pieces are taken."""
    ident = ("w", str(number))
    now = float(number)
    waiting: list[do.Instruction] = []
    spent = 0.0

    def handle(event: ev.Event) -> None:
        nonlocal spent
        begun = time.process_time()
        out = store.handle(event)
        spent += time.process_time() - begun
        waiting.extend(out)

    wanted = ev.LoadWanted(ident, ev.LoadKind.DEMAND, None, SHAPE.fingerprint, [(key, ()) for key in keys], (), 0, now)
    handle(wanted)
    first = spent
    answer: Callable[[do.Instruction], None]

    def answer(instruction: do.Instruction) -> None:
        match instruction:
            case do.Fetch():
                handle(ev.FetchDone(instruction.fetch, {}, now))
            case do.Pieces():
                handle(ev.PiecesTaken(ident, [(i, layer) for i, layer, *_ in instruction.pieces], now))
            case do.End():
                assert instruction.usable == len(keys)

    while waiting:
        answer(waiting.pop())
    return first, spent


if __name__ == "__main__":
    print(json.dumps([vars(figure) for figure in _measure(int(sys.argv[1]), int(sys.argv[2]))]))
