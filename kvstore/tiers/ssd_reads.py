"""Reads of the SSD tier's raw files: threads of their own, each of which keeps many under way and verifies each as it ends."""

from __future__ import annotations

import errno
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence

from contracts.errors import PieceLost
from contracts.kv import KvShape
from kvstore.core.events import Fault
from kvstore.core.instructions import FetchPiece
from kvstore.failpoints import reach
from kvstore.metrics import log
from kvstore.tiers.arena import Arena
from kvstore.tiers.file_io import POLL_S, FileIo, Moving, Part
from kvstore.tiers.format import piece_offset

#: Told the faults of a read by index of the piece; none: all are good.
Done = Callable[[dict[int, Fault]], None]


class Read:
    """One fetch on its way. `done` is told the faults once, when nothing writes to its slots any more."""

    __slots__ = ("done", "fd", "given_up", "moving", "pieces", "shape")

    def __init__(self, shape: KvShape, pieces: Sequence[FetchPiece], done: Done, given_up: Callable[[], bool]) -> None:
        self.shape = shape
        self.pieces = pieces
        self.done = done
        self.given_up = given_up
        self.fd = -1
        self.moving: Moving

    def all(self, fault: Fault) -> dict[int, Fault]:
        return dict.fromkeys(range(len(self.pieces)), fault)


class Reads:
    """See the module. `open_chunk(key, shape)`: a descriptor of the chunk's file; raises OSError."""

    def __init__(self, arena: Arena, reader: FileIo, open_chunk: Callable[[bytes, KvShape], int]) -> None:
        self._arena = arena
        self._reader = reader
        self._open = open_chunk
        self._queue: queue.SimpleQueue[Read | None] = queue.SimpleQueue()
        for number in range(reader.threads):
            threading.Thread(target=self._run, name=f"ssd-read-{number}", daemon=True).start()

    def begin(self, read: Read) -> None:
        """Queue it; does not block."""
        self._queue.put(read)

    def close(self) -> None:
        """Stop the threads."""
        for _ in range(self._reader.threads):
            self._queue.put(None)

    def _run(self) -> None:
        """One reading thread. What has come is verified only after others have been begun, so that the disk never waits for that."""
        running: list[Read] = []
        come: list[tuple[Read, Exception | None]] = []
        while self._fill(running, block=not running and not come):
            for read, error in come:
                self._end(read, error)
            come = []
            going: list[Read] = []
            for read in running:
                try:
                    if not read.moving.ended():
                        going.append(read)
                        continue
                    reach("ssd.after_read")
                    come.append((read, None))
                except Exception as e:
                    come.append((read, e))
            running = going
            if running and not come:
                # The more there is under way, the less it matters when the first of it is noticed.
                time.sleep(POLL_S * max(1, len(running) // 6))

    def _fill(self, running: list[Read], *, block: bool) -> bool:
        """Begin what is asked for, as long as not too much is under way; false when the threads shall stop."""
        while len(running) < self._reader.depth:
            try:
                read = self._queue.get(block=block)
            except queue.Empty:
                break
            if read is None:
                return False
            if self._begin(read):
                running.append(read)
            block = False
        return True

    def _begin(self, read: Read) -> bool:
        """Whether it is on its way; else its faults are told."""
        shape = read.shape
        if read.given_up():
            read.done(read.all(Fault.CANCELLED))
            return False
        try:
            read.fd = self._open(read.pieces[0].key, shape)
            parts = [Part(piece_offset(shape, p.layer), p.offset, shape.piece_bytes) for p in read.pieces]
            read.moving = self._reader.begin("READ", read.fd, parts)
        except Exception as e:
            self._end(read, e)
            return False
        return True

    def _end(self, read: Read, error: Exception | None) -> None:
        if read.fd >= 0:
            os.close(read.fd)
        match error:
            case None:
                faults = verify(self._arena, read.shape, read.pieces)
            case FileNotFoundError():
                faults = read.all(Fault.MISSING)
            case PieceLost():
                faults = read.all(Fault.CORRUPT)
            case OSError(errno=errno.EIO) if read.fd >= 0:
                faults = read.all(Fault.MEDIUM)
            case _:
                if not isinstance(error, OSError):
                    log.error("a read of the SSD failed in a way that is not known", exc_info=error)
                faults = read.all(Fault.UNAVAILABLE)
        read.done(faults)


def verify(arena: Arena, shape: KvShape, pieces: Sequence[FetchPiece]) -> dict[int, Fault]:
    """Which of the pieces that were just brought are not what they should be."""
    return {i: Fault.CORRUPT for i, p in enumerate(pieces) if arena.checksum(p.offset, shape.piece_bytes) != p.checksum}
