"""The SSD tier's files whose pieces went through a codec or are encrypted: which they are, and how they are written and
read.

Their bytes differ from the arena's, so plain calls move them, through the page cache. A few threads read and decode.
The headers of encrypted files are read with their pieces, because in memory they would take more than all else that is
known of a chunk.

Invariant: of the files that are in place, readable by this process, and not merely listed (ssd_recovery.py), `_headers`
has exactly those that are encoded but not encrypted, and `_sealed` those that are encrypted.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from contracts.errors import PieceLost
from kvstore.core.chunk import UNREAD
from kvstore.core.events import Fault
from kvstore.core.instructions import FetchPiece, WriteSsd
from kvstore.failpoints import reach
from kvstore.metrics import log
from kvstore.tiers.arena import Arena
from kvstore.tiers.cluster_keys import ClusterKeys
from kvstore.tiers.codec import Codec
from kvstore.tiers.codecs import Codecs, count_unreadable
from kvstore.tiers.encoded import (
    Opened,
    StoredChunk,
    decode_pieces,
    encode_chunk,
    load_chunk,
    read_header,
    read_range,
    views,
)
from kvstore.tiers.format import RAW, Header
from kvstore.tiers.key_names import KeyName
from kvstore.tiers.sealing import SessionSecret
from kvstore.tiers.ssd_reads import Done

_READING_THREADS = 4


class EncodedFiles:
    """See the module. Written by one thread at a time, read by several."""

    def __init__(
        self,
        arena: Arena,
        keys: ClusterKeys,
        codecs: Codecs,
        codec: Codec | None,
        secret_of: Callable[[KeyName], SessionSecret | None] = lambda name: None,
    ) -> None:
        """codec: for new files; None: raw. secret_of: a session's key, if it is in memory; thread-safe."""
        self._arena = arena
        self._keys = keys
        self._codecs = codecs
        self._codec = codec
        self._secret_of = secret_of
        self._headers: dict[bytes, Header] = {}
        self._sealed: dict[bytes, KeyName] = {}
        self._unsettled: dict[bytes, Header] = {}
        self._pool = ThreadPoolExecutor(_READING_THREADS, thread_name_prefix="ssd-decode")

    def header(self, key: bytes) -> Header | None:
        """The chunk's header if its file is encoded and not encrypted, else None."""
        return self._headers.get(key)

    def key_name(self, key: bytes) -> KeyName | None:
        """The name of the session's key that is needed to read the chunk's file; None: it is not encrypted."""
        return self._sealed.get(key)

    def has(self, key: bytes) -> bool:
        """Whether the chunk's file is read here."""
        return key in self._headers or key in self._sealed

    @property
    def encodes(self) -> bool:
        """Whether new files go through a codec."""
        return self._codec is not None

    def found(self, header: Header) -> bool:
        """A file's header was read: whether this process can read the file. It is kept either way."""
        if header.layout.codec != RAW and self._codecs.find(header.layout.codec) is None:
            count_unreadable()
            return False
        self._set(header.key, header)
        return True

    def _set(self, key: bytes, header: Header | None) -> None:
        """The chunk's file has this header; None: it is raw, or gone."""
        self._headers.pop(key, None)
        self._sealed.pop(key, None)
        if header is not None and header.seal is not None:
            self._sealed[key] = header.seal.key
        elif header is not None and header.layout.codec != RAW:
            self._headers[key] = header

    # ---- writing

    def encode(self, chunk: WriteSsd, secret: SessionSecret | None = None) -> StoredChunk | None:
        """The content for the chunk's file; None when it is to be written raw. secret: encrypt with it."""
        if self._codec is None and secret is None:
            return None
        pieces = views(self._arena, chunk.shape, chunk.offsets)
        stored = encode_chunk(self._keys, chunk.key, chunk.shape, pieces, chunk.checksums, self._codec, secret)
        if stored.header.layout.codec == RAW and secret is None:
            return None
        self._unsettled[chunk.key] = stored.header
        return stored

    def settle(self, key: bytes) -> None:
        """The chunk's new file is in place."""
        self._set(key, self._unsettled.pop(key, None))

    def written(self) -> None:
        """The group commit has ended: chunks that were not settled left no file."""
        self._unsettled.clear()

    def forget(self, key: bytes) -> None:
        """The chunk's file is gone."""
        self._set(key, None)

    # ---- reading

    def read(self, path: Path, key: bytes, pieces: Sequence[FetchPiece], sums: dict[int, int]) -> dict[int, Fault]:
        """Read consecutive pieces into the arena. Returns the faults by index; mutates `sums` like `decode_pieces`."""
        every = range(len(pieces))
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return dict.fromkeys(every, Fault.MISSING)
        except OSError:
            return dict.fromkeys(every, Fault.UNAVAILABLE)
        try:
            header = self.header(key) or read_header(self._keys, fd)
            start, last = header.layout.offsets[pieces[0].layer], pieces[-1].layer
            stored = read_range(fd, start, header.layout.offsets[last] + header.layout.lengths[last] - start)
            reach("ssd.after_read")
        except PieceLost:
            return dict.fromkeys(every, Fault.CORRUPT)
        except OSError as e:
            return dict.fromkeys(every, Fault.MEDIUM if e.errno == errno.EIO else Fault.UNAVAILABLE)
        finally:
            os.close(fd)
        opened = self._opened(header)
        if isinstance(opened, Fault):
            return dict.fromkeys(every, opened)
        pieces = [replace(p, checksum=header.checksums[p.layer]) if p.checksum == UNREAD else p for p in pieces]
        return decode_pieces(self._arena, opened, header, pieces, stored, start, sums)

    def _opened(self, header: Header) -> Opened | Fault:
        """What reads the pieces; or UNAVAILABLE without the codec, LOCKED without the key."""
        codec = secret = None
        if header.layout.codec != RAW:
            codec = self._codecs.find(header.layout.codec)
            if codec is None:
                return Fault.UNAVAILABLE
        if header.seal is not None:
            secret = self._secret_of(header.seal.key)
            if secret is None:
                return Fault.LOCKED
        return Opened(self._keys, header, codec, secret)

    def begin_read(
        self,
        path: Path,
        key: bytes,
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
                faults = dict.fromkeys(faults, Fault.CANCELLED) if given_up() else self.read(path, key, pieces, sums)
            except Exception as e:
                log.error("a read of an encoded file failed in a way that is not known", exc_info=e)
            finally:
                done(faults)

        self._pool.submit(work)

    def convert(self, path: Path, header: Header, codec: Codec | None, secret: SessionSecret | None) -> StoredChunk:
        """The chunk of the file with this header, encoded by another codec and encrypted with `secret`, if given.
        Raises PieceLost, OSError."""
        opened = self._opened(header)
        if isinstance(opened, Fault):
            raise PieceLost(f"the file cannot be read: {opened.name}")
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            pieces, sums = load_chunk(fd, header, opened)
        finally:
            os.close(fd)
        return encode_chunk(self._keys, header.key, header.shape, pieces, sums, codec, secret)

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown(wait=False)
