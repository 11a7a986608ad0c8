"""Measures how fast KV loads into HBM from each tier of a real store, with the worker's own link, loader and pages.

Time runs from the request to the store until the last page is filled. Chunks have random keys, so no real cache is read
or replaced. The store must evict whole sessions (kv.layer_priority off): its arena holds ARENA_SETS sets, so each of
the SETS sets, read in turn, has left it before it is read again.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from contracts.ids import SessionKey
from contracts.kv import KvShape, Manifest
from contracts.latency_profile import LoadRate
from worker.core.block import Block, SaveState
from worker.core.events import LoadClosed, SaveCopied, StoreDown, StoreUp
from worker.core.policy import Policy
from worker.core.saving import Saving
from worker.core.state import CoreState
from worker.engine.executor import Executor

#: Number of sets of chunks that are read in turn, and how many of them fit into the store's arena.
SETS, ARENA_SETS = 4, 2.5
#: Chunks of a small load.
SMALL_CHUNKS = 2
_ANSWER_S = 60.0
#: Pause before each load, in seconds, for the store to finish earlier work.
_REST_S = 0.1
_SESSION = SessionKey("profile", "profile")


class LoadFailed(RuntimeError):
    """The store did not save or load what it should have."""


def large_chunks(shape: KvShape, arena_bytes: int) -> int:
    """Number of chunks of a large load: one set. Raises LoadFailed if the arena is too small for the shape."""
    chunks = int(arena_bytes / ARENA_SETS / shape.chunk_bytes)
    if chunks < 2 * SMALL_CHUNKS:
        need = 2 * SMALL_CHUNKS * ARENA_SETS * shape.chunk_bytes
        raise LoadFailed(
            f"an arena of {arena_bytes >> 20} MiB is too small to measure loads: chunks of this model need "
            f"{need / 2**20:.0f} MiB"
        )
    return chunks


@dataclass(slots=True)
class Mover:
    """Saves and loads chunks over one attachment, one at a time.

    inbox: receives the events of link and loader. large: chunks of a large load.
    """

    executor: Executor
    inbox: queue.SimpleQueue[object]
    large: int
    state: CoreState = field(init=False)

    def __post_init__(self) -> None:
        d = self.executor
        self.state = CoreState(d.shape, d.cache, Policy(), d.salt_of, "profile")

    def attached(self) -> None:
        """Wait until the store is attached. Raises LoadFailed."""
        self._until(lambda event: isinstance(event, StoreUp), Saving(self.state))
        self.state.attached = True

    def put(self, keys: Sequence[bytes], name: str) -> None:
        """Save these chunks, of arbitrary content, as session `name`. Raises LoadFailed unless the store took all."""
        saving, session = Saving(self.state), SessionKey("profile", name)
        blocks = self._blocks(len(keys))
        for block, key in zip(blocks, keys, strict=True):
            block.ready[:], block.key = True, key
        saving.offer(session, blocks)
        self.state.now = self.executor.clock.now()
        saving.turn_ended(Manifest(session, "profile", self.executor.shape.fingerprint, list(keys)), blocks)
        self._until(lambda event: not saving.busy, saving)
        taken = all(block.save is SaveState.BELOW for block in blocks)
        self._drop(blocks)
        if not taken:
            raise LoadFailed("the store had no room for a set of chunks; give it more DRAM (kv.dram_gib)")

    def load(self, keys: Sequence[bytes], sources: Sequence[str] = ()) -> float:
        """Load these chunks. Returns the seconds until all are in HBM. Raises LoadFailed unless all arrived."""
        d = self.executor
        blocks = self._blocks(len(keys))
        every = [list(range(d.shape.layers))] * len(keys)
        threading.Event().wait(_REST_S)
        began = d.clock.now()
        load = self.state.open_load(
            _SESSION, list(keys), blocks, every, hint=False, priority=0, source_nodes=list(sources)
        )
        self._until(lambda event: isinstance(event, LoadClosed) and event.load_id == load.load_id, Saving(self.state))
        seconds = d.clock.now() - began
        whole = all(block.complete for block in blocks)
        self._drop(blocks)
        if not whole:
            raise LoadFailed("chunks that had been saved did not come back")
        return seconds

    def _blocks(self, count: int) -> list[Block]:
        cache, layers = self.executor.cache, range(self.executor.shape.layers)
        blocks = [cache.new_block(i, _SESSION, layers) for i in range(count)]
        for block in blocks:
            cache.use(block)
        self.state.back()
        return blocks

    def _drop(self, blocks: list[Block]) -> None:
        for block in blocks:
            block.key = None
            self.executor.cache.release(block)

    def _execute(self) -> None:
        asked, self.state.out = self.state.out, []
        for instruction in asked:
            self.executor.execute(instruction)

    def _until(self, over: Callable[[object], bool], saving: Saving) -> None:
        """Process events, as the engine does, until `over(event)`. Raises LoadFailed."""
        deadline = self.executor.clock.now() + _ANSWER_S
        while True:
            self._execute()
            try:
                event = self.inbox.get(timeout=max(deadline - self.executor.clock.now(), 0.001))
            except queue.Empty:
                raise LoadFailed(f"the store said nothing for {_ANSWER_S:.0f} s") from None
            match event:
                case SaveCopied():
                    saving.copied(event)
                    self._execute()
                case LoadClosed():
                    while self.executor.table.arrived:
                        self.state.came(self.executor.table.arrived.popleft())
                    self.state.closed(event)
                    self.executor.table.open.pop(event.load_id, None)
                case StoreDown():
                    raise LoadFailed("the store went away")
            if over(event):
                return


def new_keys(count: int) -> list[bytes]:
    """Random, unused chunk keys."""
    return [os.urandom(32) for _ in range(count)]


#: Loads that many chunks from a source; returns the seconds.
Load = Callable[[int], float]


def rates(
    shape: KvShape, large: int, loads: dict[str, Load], repetitions: int, say: Callable[[str], None]
) -> dict[str, LoadRate]:
    """Rates by source, from medians of small and large loads. Sources alternate, so that a disturbance affects all. The
    first round does not count."""
    sizes = (SMALL_CHUNKS, large)
    times: dict[str, list[list[float]]] = {name: [[], []] for name in loads}
    for repetition in range(repetitions + 1):
        for i, chunks in enumerate(sizes):
            for name, load in loads.items():
                seconds = load(chunks)
                if repetition:
                    times[name][i].append(seconds)
    found = {}
    for name, (small, big) in times.items():
        small_bytes, large_bytes = (chunks * shape.chunk_bytes for chunks in sizes)
        found[name] = LoadRate.measured(small_bytes, statistics.median(small), large_bytes, statistics.median(big))
        say(f"load from {name}: {1000 * found[name].first_s:.1f} ms, then {found[name].bytes_per_s / 1e9:.2f} GB/s")
    return found


def own_rates(
    mover: Mover, flush: Callable[[], None], ssd: Path, repetitions: int, say: Callable[[str], None]
) -> dict[str, LoadRate]:
    """Rates from the SSD, with and without the page cache, and from the arena."""
    few, *sets = [new_keys(mover.large) for _ in range(SETS + 1)]
    for n, keys in enumerate([few, *sets]):
        mover.put(keys, f"profile-{n}")
        flush()
    # Small loads read other chunks than large ones; otherwise every second set would never leave the arena.
    small = itertools.cycle([few[i : i + SMALL_CHUNKS] for i in range(0, len(few) - SMALL_CHUNKS + 1, SMALL_CHUNKS)])
    large = itertools.cycle(sets)
    last: list[bytes] = []

    def from_ssd(chunks: int) -> float:
        last[:] = next(small) if chunks == SMALL_CHUNKS else next(large)
        return mover.load(last)

    def from_cold_ssd(chunks: int) -> float:
        forget_page_cache(ssd)
        return from_ssd(chunks)

    loads: dict[str, Load] = {"ssd": from_ssd, "ssd_cold": from_cold_ssd, "dram": lambda chunks: mover.load(last)}
    return rates(mover.executor.shape, mover.large, loads, repetitions, say)


def peer_rate(
    owner: Mover,
    reader: Mover,
    owner_node: str,
    flush: Callable[[], None],
    repetitions: int,
    say: Callable[[str], None],
) -> LoadRate:
    """Rate from the DRAM of another node's store. Each load reads chunks that the reading store does not have."""

    def load(chunks: int) -> float:
        keys = new_keys(chunks)
        owner.put(keys, f"profile-peer-{keys[0].hex()}")
        flush()
        return reader.load(keys, [owner_node])

    return rates(reader.executor.shape, reader.large, {"peer": load}, repetitions, say)["peer"]


def forget_page_cache(folder: Path) -> None:
    """Drop these files from the page cache."""
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
