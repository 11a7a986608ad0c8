"""Reads of the SSD tier's raw files: each reading thread keeps many reads in flight; other threads verify them as they
end.

Short waiting reads are joined to one transfer, which costs its overhead once. Bytes in the page cache are copied from
there.
"""

from __future__ import annotations

import errno
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from contracts.errors import PieceLost
from contracts.kv import KvShape
from kvstore.core.events import Fault
from kvstore.core.instructions import FetchPiece
from kvstore.failpoints import reach
from kvstore.metrics import log
from kvstore.tiers import page_cache
from kvstore.tiers.arena import Arena
from kvstore.tiers.cluster_keys import ClusterKeys
from kvstore.tiers.file_io import POLL_S, FileIo, Moving, Part, ThreadFileIo, check_length
from kvstore.tiers.format import piece_offset

#: A core hashes 2 to 3 GB/s.
_VERIFYING_THREADS = 4

#: Called with the faults of a read, by index of the piece; empty: all are good.
Done = Callable[[dict[int, Fault]], None]


class Read:
    """One fetch in progress. `done(faults)` is called once, when nothing writes to its slots any more."""

    __slots__ = ("done", "fd", "given_up", "parts", "pieces", "shape", "sums")

    def __init__(
        self,
        shape: KvShape,
        pieces: Sequence[FetchPiece],
        done: Done,
        sums: dict[int, int],
        given_up: Callable[[], bool],
    ) -> None:
        self.shape = shape
        self.pieces = pieces
        self.done = done
        self.sums = sums
        self.given_up = given_up
        self.fd = -1
        self.parts: list[Part] = []

    def all(self, fault: Fault) -> dict[int, Fault]:
        return dict.fromkeys(range(len(self.pieces)), fault)


class _Transfer:
    """Reads that were joined to one transfer."""

    __slots__ = ("moving", "reads")

    def __init__(self, reads: list[Read], moving: Moving) -> None:
        self.reads = reads
        self.moving = moving


class Reads:
    """See the module. open_chunk(key, shape): a descriptor of the chunk's file; raises OSError. use_cache: read through
    the page cache what it holds, although descriptors are open with O_DIRECT."""

    def __init__(
        self,
        arena: Arena,
        keys: ClusterKeys,
        reader: FileIo,
        open_chunk: Callable[[bytes, KvShape], int],
        use_cache: bool,
    ) -> None:
        self._arena = arena
        self._keys = keys
        self._reader = reader
        self._copier = ThreadFileIo(arena)
        self._open = open_chunk
        self._use_cache = use_cache
        self._queue: queue.SimpleQueue[Read | None] = queue.SimpleQueue()
        self._verifying = ThreadPoolExecutor(_VERIFYING_THREADS, thread_name_prefix="ssd-verify")
        for number in range(reader.threads):
            threading.Thread(target=self._run, name=f"ssd-read-{number}", daemon=True).start()

    def begin(self, read: Read) -> None:
        """Queue it; does not block."""
        self._queue.put(read)

    def close(self) -> None:
        """Stop the threads."""
        for _ in range(self._reader.threads):
            self._queue.put(None)
        self._verifying.shutdown(wait=False)

    def _run(self) -> None:
        """One reading thread. It begins new reads before it verifies ended ones, so that the disk is never idle."""
        running: list[_Transfer] = []
        come: list[_Transfer] = []
        while self._fill(running, block=not running and not come):
            if come:
                self._end_good([read for transfer in come for read in transfer.reads], alone=not running)
                come = []
            going: list[_Transfer] = []
            for transfer in running:
                try:
                    if not transfer.moving.ended():
                        going.append(transfer)
                        continue
                    for _ in transfer.reads:
                        reach("ssd.after_read")
                    come.append(transfer)
                except Exception as e:
                    self._failed(transfer.reads, e)
            running = going
            if running and not come:
                # With more reads in flight, noticing the first one's end matters less.
                time.sleep(POLL_S * max(1, sum(len(t.reads) for t in running) // 6))

    def _fill(self, running: list[_Transfer], *, block: bool) -> bool:
        """Begin waiting reads, up to the depth. block: wait for the first. False when the thread is to stop."""
        most = self._reader.depth - sum(len(t.reads) for t in running)
        joined: list[Read] = []
        size = taken = 0
        while taken < most:
            try:
                read = self._queue.get(block=block)
            except queue.Empty:
                break
            if read is None:
                return False
            block = False
            taken += 1
            if not self._opened(read):
                continue
            if self._cached(read):
                self._begin(running, [read], self._copier)
                continue
            if joined and size + _bytes(read) > self._reader.joined_bytes:
                self._begin(running, joined, self._reader)
                joined, size = [], 0
            joined.append(read)
            size += _bytes(read)
        if joined:
            self._begin(running, joined, self._reader)
        return True

    def _opened(self, read: Read) -> bool:
        """Open the read's file and check its length. False when the read has ended here, with its faults reported."""
        if read.given_up():
            read.done(read.all(Fault.CANCELLED))
            return False
        shape = read.shape
        try:
            read.fd = self._open(read.pieces[0].key, shape)
            read.parts = [Part(piece_offset(shape, p.layer), p.offset, shape.piece_bytes) for p in read.pieces]
            check_length(read.fd, read.parts)
        except Exception as e:
            self._end_bad(read, e)
            return False
        return True

    def _cached(self, read: Read) -> bool:
        first, last = read.parts[0], read.parts[-1]
        return self._use_cache and page_cache.turn_to(
            read.fd, first.file_offset, last.file_offset + last.length - first.file_offset
        )

    def _begin(self, running: list[_Transfer], reads: list[Read], io: FileIo) -> None:
        try:
            if len(reads) == 1:
                moving = io.begin("READ", reads[0].fd, reads[0].parts)
            else:
                moving = io.begin_joined([(read.fd, read.parts) for read in reads])
        except Exception as e:
            self._failed(reads, e)
        else:
            running.append(_Transfer(reads, moving))

    def _failed(self, reads: list[Read], error: Exception) -> None:
        """A transfer failed. Joined reads are each tried alone, so that one bad file does not fail the others."""
        if len(reads) == 1:
            self._end_bad(reads[0], error)
            return
        for read in reads:
            try:
                self._reader.read(read.fd, read.parts)
                reach("ssd.after_read")
            except Exception as e:
                self._end_bad(read, e)
            else:
                self._end_good([read])

    def _end_good(self, reads: list[Read], *, alone: bool = True) -> None:
        """Verify the reads: several at a time, and never in the way of running transfers. alone: none is running."""
        for read in reads:
            os.close(read.fd)
            if alone and len(reads) == 1:
                self._verify(read)
            else:
                self._verifying.submit(self._verify, read)

    def _verify(self, read: Read) -> None:
        faults = read.all(Fault.UNAVAILABLE)
        try:
            faults = verify_stored(self._arena, self._keys, read.shape, read.pieces, read.sums)
        except Exception as e:
            log.error("a read of the SSD could not be verified", exc_info=e)
        finally:
            read.done(faults)

    def _end_bad(self, read: Read, error: Exception) -> None:
        if read.fd >= 0:
            os.close(read.fd)
        read.done(read.all(fault_of(error, opened=read.fd >= 0)))


def fault_of(error: Exception, *, opened: bool) -> Fault:
    """The fault of pieces whose read failed with this error. opened: whether their file could be opened."""
    match error:
        case FileNotFoundError():
            return Fault.MISSING
        case PieceLost():
            return Fault.CORRUPT
        case OSError(errno=errno.EIO) if opened:
            return Fault.MEDIUM
        case OSError():
            return Fault.UNAVAILABLE
    log.error("a read of the SSD failed unexpectedly", exc_info=error)
    return Fault.UNAVAILABLE


def _bytes(read: Read) -> int:
    return len(read.pieces) * read.shape.piece_bytes


def verify_stored(
    arena: Arena, keys: ClusterKeys, shape: KvShape, pieces: Sequence[FetchPiece], sums: dict[int, int]
) -> dict[int, Fault]:
    """CORRUPT for each piece of a raw, unencrypted copy that is in the arena and whose digest is wrong.

    Mutates `sums`: by index, the arena's checksums of the others.
    """
    size, view = shape.piece_bytes, arena.view
    faults = {
        i: Fault.CORRUPT
        for i, p in enumerate(pieces)
        if keys.digest(view[p.offset : p.offset + size], p.key, p.layer) != p.checksum
    }
    good = [i for i in range(len(pieces)) if i not in faults]
    sums.update(zip(good, arena.checksums([(pieces[i].offset, size) for i in good]), strict=True))
    return faults


def verify(arena: Arena, fetches: Sequence[tuple[KvShape, Sequence[FetchPiece]]]) -> list[dict[int, Fault]]:
    """By fetch, CORRUPT for each piece in the arena whose xxh3-64 is not what a peer's arena has."""
    sums = iter(arena.checksums([(p.offset, shape.piece_bytes) for shape, pieces in fetches for p in pieces]))
    return [{i: Fault.CORRUPT for i, p in enumerate(pieces) if next(sums) != p.checksum} for _, pieces in fetches]
