"""SSD to arena and back, through the store's path and through bare NIXL POSIX with the same sizes, depth and fsyncs."""

from __future__ import annotations

import asyncio
import mmap
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import uvloop
from ground import GB, KEYS, SHAPE, SHAPE_8B, arena, bands, bare_agent, chunks, forget_page_cache
from pairs import Figure, Pair, compare

from contracts.kv import KvShape
from kvstore.core.events import Event, LoadKind, SourceKind, SsdWritten, Wrote
from kvstore.core.fetches import RUNNING_LIMIT
from kvstore.core.instructions import FetchPiece, WriteSsd
from kvstore.core.prefetch import reads as cut
from kvstore.mailbox import Mailbox
from kvstore.tiers.arena import Arena
from kvstore.tiers.blob import BlobTier
from kvstore.tiers.file_io import NixlFileIo, make_file_io
from kvstore.tiers.format import Header, encode_header, object_bytes, piece_offset, raw_layout
from kvstore.tiers.objects import open_store
from kvstore.tiers.ssd import SsdTier
from kvstore.writeback import WriteBack
from runtime.clock import RealClock
from runtime.service import Tasks

#: The store's number of sync threads (kvstore/tiers/ssd.py).
SYNC_THREADS = 4
DEPTH = NixlFileIo.depth
READS_AT_A_TIME = RUNNING_LIMIT[SourceKind.SSD]
_GROUP_BYTES = 64 << 20


def measure(scratch: Path, quick: bool) -> list[Pair | Figure]:
    """Reads and writes of two shapes, in turns with bare NIXL."""
    repetitions = 5 if quick else 15
    sizes = (("131 M model", SHAPE, 64 if quick else 128), ("8 B model", SHAPE_8B, 8 if quick else 24))
    return [
        found
        for name, shape, count in sizes
        for found in _measure(scratch / name[:3].strip(), name, shape, count, repetitions)
    ]


def _measure(scratch: Path, model: str, shape: KvShape, count: int, repetitions: int) -> list[Pair | Figure]:
    amount = count * shape.chunk_bytes / GB
    found: list[Pair | Figure] = []
    with arena(2 * count * shape.chunk_bytes, model[:3].strip()) as memory:
        writes = chunks(memory, shape, count)
        reader, writer = (make_file_io("nixl", memory, f"ours-{what}") for what in ("reads", "writes"))
        tier = SsdTier(scratch / "ssd", memory, KEYS, reader, writer, "auto")
        assert set(tier.write(writes)) == {Wrote.OK}
        paths = [tier.path(w.key, shape.fingerprint) for w in writes]
        reads = bands(
            writes,
            len(cut(shape, list(range(shape.layers)), SourceKind.SSD, LoadKind.DEMAND)[0]),
            base=count * shape.chunk_bytes,
            sums=sums_of(tier, writes),
        )
        bare = BareFiles(bare_agent(f"bare-{model}", "POSIX", memory), memory, f"bare-{model}", shape)

        def cold(read: Any) -> float:
            forget_page_cache(paths)
            seconds: float = read()
            return seconds

        ours = partial(cold, lambda: read_by_store(tier, shape, reads))
        how = "O_DIRECT" if tier.direct else "page cache"
        for direct in (True, False) if tier.direct else (False,):
            other = partial(cold, partial(bare.read, reads, tier, direct))
            name = "with O_DIRECT" if direct else "through the page cache"
            found.append(
                compare(
                    f"SSD to arena, verified, against bare NIXL POSIX {name}: {model}",
                    ours,
                    other,
                    amount,
                    "GB/s",
                    repetitions,
                    0.85,
                    f"cold; ours: {how}; reads of {len(reads[0])} x {shape.piece_bytes >> 10} KiB, {DEPTH} under way",
                )
            )
        for direct in (True, False) if tier.direct else (False,):
            name = "with O_DIRECT" if direct else "through the page cache"
            found.append(
                compare(
                    f"arena to SSD in group commits, against bare NIXL POSIX {name} and the same fsyncs: {model}",
                    partial(write_by_store, tier, memory, writes, scratch),
                    partial(bare.write, writes, scratch / "bare", direct),
                    amount,
                    "GB/s",
                    repetitions,
                    0.85,
                    f"chunks of {shape.chunk_bytes >> 10} KiB in groups of 64 MiB at most",
                )
            )
        one = compare(
            f"a group commit against one fsync a chunk: {model}",
            partial(write_by_store, tier, memory, writes, scratch),
            partial(one_by_one, tier, writes),
            amount,
            "GB/s",
            max(3, repetitions // 3),
        )
        found.append(one)
        tier.close()
    shutil.rmtree(scratch / "ssd", ignore_errors=True)
    return found


def sums_of(tier: SsdTier, writes: Sequence[WriteSsd]) -> dict[bytes, tuple[int, ...]]:
    """Checksums of the tier's copies."""
    return {w.key: tier.header(w.key, w.shape.fingerprint).checksums for w in writes}


def read_by_store(tier: SsdTier, shape: KvShape, reads: Sequence[tuple[FetchPiece, ...]]) -> float:
    """Seconds by the store's path: its reader threads, the core's depth, completions through the event loop, every
    piece verified."""

    async def run() -> float:
        ended = asyncio.get_running_loop().create_future()
        box = Mailbox(ended.set_exception)
        waiting: Iterator[tuple[FetchPiece, ...]] = iter(reads)
        left = len(reads)

        def start() -> None:
            pieces = next(waiting, None)
            if pieces is not None:
                tier.begin_read(shape, pieces, lambda faults: box.put(partial(done, faults)))

        def done(faults: dict[int, Any]) -> None:
            nonlocal left
            assert not faults, faults
            left -= 1
            start()
            if not left:
                ended.set_result(None)

        begun = time.perf_counter()
        for _ in range(READS_AT_A_TIME):
            start()
        await ended
        return time.perf_counter() - begun

    return uvloop.run(run())


def write_by_store(tier: SsdTier, memory: Arena, writes: Sequence[WriteSsd], scratch: Path) -> float:
    """Seconds by the store's path: WriteBack's queue, group commits, one answer per chunk."""

    async def run() -> float:
        tasks = Tasks()
        ended = asyncio.get_running_loop().create_future()
        left = len(writes)

        def report(event: Event) -> None:
            nonlocal left
            assert isinstance(event, SsdWritten) and event.outcome is Wrote.OK
            left -= 1
            if not left:
                ended.set_result(None)

        blob = BlobTier(open_store("", {}, scratch / "blob"), memory, KEYS)
        back = WriteBack(tier, blob, memory, KEYS, RealClock(), report, tasks)
        back.start()
        begun = time.perf_counter()
        for write in writes:
            back.disk(write)
        await ended
        seconds = time.perf_counter() - begun
        await tasks.cancel()
        back.close()
        return seconds

    for write in writes:
        tier.delete(write.key, write.shape.fingerprint)
    return uvloop.run(run())


def one_by_one(tier: SsdTier, writes: Sequence[WriteSsd]) -> float:
    """Seconds without group commits: each chunk is durable before the next."""
    for write in writes:
        tier.delete(write.key, write.shape.fingerprint)
    begun = time.perf_counter()
    for write in writes:
        assert tier.write([write]) == [Wrote.OK]
    return time.perf_counter() - begun


class BareFiles:
    """A bare agent: no store, checksums or event loop. Files to read are opened and registered beforehand."""

    def __init__(self, agent: Any, memory: Arena, name: str, shape: KvShape) -> None:
        self.agent = agent
        self.shape = shape
        self.memory = memory
        self.name = name
        self.header = mmap.mmap(-1, 4096)
        import ctypes

        self.header_address = ctypes.addressof(ctypes.c_char.from_buffer(self.header))
        agent.register_memory([(self.header_address, 4096, 0, "")], "DRAM", backends=["POSIX"])

    def _begin(self, operation: str, local: list[Any], remote: list[Any]) -> Any:
        agent = self.agent
        handle = agent.initialize_xfer(
            operation, agent.get_xfer_descs(local, "DRAM"), agent.get_xfer_descs(remote, "FILE"), self.name
        )
        if agent.transfer(handle) == "ERR":
            raise OSError("bare NIXL failed")
        return handle

    def _ended(self, handle: Any) -> bool:
        state = self.agent.check_xfer_state(handle)
        if state == "ERR":
            raise OSError("bare NIXL failed")
        if state == "DONE":
            handle.release()
        return state == "DONE"

    def _run_all(self, begin: Iterator[Any]) -> None:
        """Run the transfers with at most DEPTH at a time, like the store."""
        running: list[Any] = []
        for handle in begin:
            running.append(handle)
            while len(running) >= DEPTH:
                running = [h for h in running if not self._ended(h)]
        while running:
            running = [h for h in running if not self._ended(h)]

    def read(self, reads: Sequence[tuple[FetchPiece, ...]], tier: SsdTier, direct: bool) -> float:
        keys = {pieces[0].key for pieces in reads}
        flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
        files = {key: os.open(tier.path(key, self.shape.fingerprint), flags) for key in keys}
        registered = self.agent.register_memory(
            [(0, object_bytes(self.shape), fd, "") for fd in files.values()], "FILE", backends=["POSIX"]
        )
        size, base = self.shape.piece_bytes, self.memory.address
        begun = time.perf_counter()
        self._run_all(
            self._begin(
                "READ",
                [(base + p.offset, size, 0) for p in pieces],
                [(piece_offset(self.shape, p.layer), size, files[p.key]) for p in pieces],
            )
            for pieces in reads
        )
        seconds = time.perf_counter() - begun
        self.agent.deregister_memory(registered)
        for fd in files.values():
            os.close(fd)
        return seconds

    def write(self, writes: Sequence[WriteSsd], folder: Path, direct: bool) -> float:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.header[:] = encode_header(
            KEYS, Header(writes[0].key, self.shape, raw_layout(self.shape), writes[0].checksums)
        )
        group = max(1, _GROUP_BYTES // self.shape.chunk_bytes)
        begun = time.perf_counter()
        with ThreadPoolExecutor(SYNC_THREADS) as pool:
            for first in range(0, len(writes), group):
                self._group(writes[first : first + group], folder, direct, pool)
        seconds = time.perf_counter() - begun
        shutil.rmtree(folder)
        return seconds

    def _group(self, writes: Sequence[WriteSsd], folder: Path, direct: bool, pool: ThreadPoolExecutor) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | (os.O_DIRECT if direct else 0)
        size, base = self.shape.piece_bytes, self.memory.address
        files: list[int] = []
        registered: list[Any] = []

        def begin() -> Iterator[Any]:
            for write in writes:
                fd = os.open(folder / (write.key.hex() + ".part"), flags, 0o600)
                files.append(fd)
                os.ftruncate(fd, object_bytes(self.shape))
                registered.append(
                    self.agent.register_memory([(0, object_bytes(self.shape), fd, "")], "FILE", backends=["POSIX"])
                )
                local = [(self.header_address, 4096, 0), *((base + offset, size, 0) for offset in write.offsets)]
                remote = [
                    (0, 4096, fd),
                    *((piece_offset(self.shape, layer), size, fd) for layer in range(self.shape.layers)),
                ]
                yield self._begin("WRITE", local, remote)

        self._run_all(begin())
        list(pool.map(os.fdatasync, files))
        for write in writes:
            (folder / (write.key.hex() + ".part")).rename(folder / write.key.hex())
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(fd)
        os.close(fd)
        for memory in registered:
            self.agent.deregister_memory(memory)
        for fd in files:
            os.close(fd)
