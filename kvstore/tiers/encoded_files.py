"""The SSD tier's files whose pieces went through a codec: which they are, and how they are written and read.

Their bytes differ from the arena's, so plain calls move them, through the page cache. A few threads read and decode.

Invariant: `_headers` has exactly the files that are in place, not raw, and readable by this process.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvstore.core.events import Fault
from kvstore.core.instructions import FetchPiece, WriteSsd
from kvstore.metrics import log
from kvstore.tiers.arena import Arena
from kvstore.tiers.codec import Codec
from kvstore.tiers.codecs import Codecs, count_unreadable
from kvstore.tiers.encoded import StoredChunk, decode_pieces, encode_chunk, load_chunk, read_range, views
from kvstore.tiers.format import RAW, Header
from kvstore.tiers.ssd_reads import Done

_READING_THREADS = 4


class EncodedFiles:
    """See the module. Written by one thread at a time, read by several."""

    def __init__(self, arena: Arena, codecs: Codecs, codec: Codec | None) -> None:
        """codec: for new files; None: raw."""
        self._arena = arena
        self._codecs = codecs
        self._codec = codec
        self._headers: dict[bytes, Header] = {}
        self._unsettled: dict[bytes, Header] = {}
        self._pool = ThreadPoolExecutor(_READING_THREADS, thread_name_prefix="ssd-decode")

    def header(self, key: bytes) -> Header | None:
        """The chunk's header if its file is encoded, else None."""
        return self._headers.get(key)

    def found(self, header: Header) -> bool:
        """At recovery: whether this process can read the file. It is kept either way."""
        if header.layout.codec == RAW:
            return True
        if self._codecs.find(header.layout.codec) is None:
            count_unreadable()
            return False
        self._headers[header.key] = header
        return True

    @property
    def encodes(self) -> bool:
        """Whether new files go through a codec."""
        return self._codec is not None

    # ---- writing

    def encode(self, chunk: WriteSsd) -> StoredChunk | None:
        """The content for the chunk's file; None when it is to be written raw."""
        if self._codec is None:
            return None
        stored = encode_chunk(
            chunk.key, chunk.shape, views(self._arena, chunk.shape, chunk.offsets), chunk.checksums, self._codec
        )
        if stored.header.layout.codec == RAW:
            return None
        self._unsettled[chunk.key] = stored.header
        return stored

    def settle(self, key: bytes) -> None:
        """The chunk's new file is in place."""
        header = self._unsettled.pop(key, None)
        if header is None:
            self._headers.pop(key, None)
        else:
            self._headers[key] = header

    def written(self) -> None:
        """The group commit has ended: chunks that were not settled left no file."""
        self._unsettled.clear()

    def forget(self, key: bytes) -> None:
        """The chunk's file is gone."""
        self._headers.pop(key, None)

    # ---- reading

    def read(self, path: Path, header: Header, pieces: Sequence[FetchPiece], sums: dict[int, int]) -> dict[int, Fault]:
        """Read consecutive pieces into the arena. Returns the faults by index; mutates `sums` like `decode_pieces`."""
        start, last = header.layout.offsets[pieces[0].layer], pieces[-1].layer
        length = header.layout.offsets[last] + header.layout.lengths[last] - start
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return dict.fromkeys(range(len(pieces)), Fault.MISSING)
        except OSError:
            return dict.fromkeys(range(len(pieces)), Fault.UNAVAILABLE)
        try:
            stored = read_range(fd, start, length)
        except OSError as e:
            return dict.fromkeys(range(len(pieces)), Fault.MEDIUM if e.errno == errno.EIO else Fault.UNAVAILABLE)
        finally:
            os.close(fd)
        codec = self._codecs.find(header.layout.codec)
        if codec is None:
            return dict.fromkeys(range(len(pieces)), Fault.UNAVAILABLE)
        return decode_pieces(self._arena, codec, header.shape, header.layout, pieces, stored, start, sums)

    def begin_read(
        self,
        path: Path,
        header: Header,
        pieces: Sequence[FetchPiece],
        sums: dict[int, int],
        done: Done,
        given_up: Callable[[], bool],
    ) -> None:
        """Like `read`, without blocking: `done` is always called on another thread. A read that is `given_up` by then
        ends with CANCELLED."""

        def work() -> None:
            faults = dict.fromkeys(range(len(pieces)), Fault.UNAVAILABLE)
            try:
                faults = dict.fromkeys(faults, Fault.CANCELLED) if given_up() else self.read(path, header, pieces, sums)
            except Exception as e:
                log.error("a read of an encoded file failed in a way that is not known", exc_info=e)
            finally:
                done(faults)

        self._pool.submit(work)

    def convert(self, path: Path, header: Header, codec: Codec | None) -> StoredChunk:
        """The chunk of the file with this header, encoded by another codec. Raises PieceLost, OSError."""
        reader = None if header.layout.codec == RAW else self._codecs.find(header.layout.codec)
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            pieces, sums = load_chunk(fd, header, reader)
        finally:
            os.close(fd)
        return encode_chunk(header.key, header.shape, pieces, sums, codec)

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown(wait=False)
