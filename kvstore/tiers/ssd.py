"""The SSD tier: one file per chunk, `ssd/<first half of the fingerprint>/<key>`, written in group commits and recovered
from names (ssd_recovery.py).

A chunk is visible only when it is complete and durable: it is written under a temporary name, synced, renamed, and its
directory synced, many chunks at a time. Recovery deletes incomplete files.

A file that recovery only listed is not trusted: its header is read and checked before a piece of it is.

Files bypass the page cache where the file system allows it and pieces are whole pages: the arena is the cache
(docs/design/0001). Threads of their own read, keep many reads in flight and verify each as it ends.
"""

from __future__ import annotations

import contextlib
import os
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from contracts.errors import ConfigError, PieceLost
from contracts.kv import KvShape
from kvstore.core.chunk import UNREAD
from kvstore.core.events import Fault, Wrote
from kvstore.core.instructions import FetchPiece, WriteSsd
from kvstore.failpoints import reach
from kvstore.tiers.arena import Arena
from kvstore.tiers.cluster_keys import ClusterKeys
from kvstore.tiers.codecs import Codecs
from kvstore.tiers.durability import sync_file, sync_folder, write_outcome
from kvstore.tiers.encoded import StoredChunk, refuted, views, write_object
from kvstore.tiers.encoded_files import EncodedFiles
from kvstore.tiers.file_io import POLL_S, FileIo, Moving, Part, direct_works
from kvstore.tiers.format import BLOCK, Header, encode_header, object_bytes, piece_offset, raw_layout
from kvstore.tiers.sealing import SessionSecret
from kvstore.tiers.ssd_reads import Done, Read, Reads, fault_of
from kvstore.tiers.ssd_recovery import Recovery, folder_name, header_of, recover

_TEMPORARY = ".part"
_SYNC_THREADS = _PREPARING_THREADS = _HEADER_THREADS = 4
#: Most chunks whose digests are kept after their header was read; of others it is read again.
_HEADERS_KEPT = 1 << 16
_TRIAL_BLOCK = 1 << 20
#: Longest pause between two polls of running writes.
_LONGEST_PAUSE_S = 0.002


class SsdTier:
    """See the module. Blocking, except `begin_read`; the shell calls it from threads. Reads and writes have a FileIo
    each, because each serves its own threads."""

    def __init__(
        self,
        root: Path,
        arena: Arena,
        keys: ClusterKeys,
        reader: FileIo,
        writer: FileIo,
        direct: Literal["auto", "on", "off"] = "auto",
        encoded: EncodedFiles | None = None,
    ) -> None:
        """encoded: handles files that are not raw, or encrypted. Raises ConfigError when `direct` is "on" and the file
        system does not support it."""
        self.root = root
        self.encoded = encoded or EncodedFiles(arena, keys, Codecs(), None)
        self._arena = arena
        self._keys = keys
        self._writer = writer
        self._sync = ThreadPoolExecutor(_SYNC_THREADS, thread_name_prefix="ssd-sync")
        self._preparing = ThreadPoolExecutor(_PREPARING_THREADS, thread_name_prefix="ssd-prepare")
        self._header_readers = ThreadPoolExecutor(_HEADER_THREADS, thread_name_prefix="ssd-header")
        self._digests: dict[bytes, tuple[int, ...]] = {}  #: from headers of files that were only listed, latest last
        self._folders: dict[bytes, str] = {}  #: by fingerprint, cached because every read needs it
        self._direct_wanted = direct
        self.direct = False
        with contextlib.suppress(OSError):
            self._open()
        self._reads = Reads(arena, keys, reader, self._open_chunk, use_cache=direct != "on")

    def _open(self) -> None:
        """Make the directory. Raises OSError on failure, ConfigError when it does not fit the configuration."""
        self.root.mkdir(parents=True, exist_ok=True)
        try:
            self.direct = self._direct_wanted != "off" and direct_works(self.root)
        except OSError:
            return  # a disk that cannot be written may still be readable
        if self._direct_wanted == "on" and not self.direct:
            raise ConfigError(
                f"kv.direct_io = 'on': the file system of {self.root} refuses O_DIRECT; set kv.direct_io: auto or off"
            )

    def _flags(self, shape: KvShape) -> int:
        """The flags to open a chunk's file with. Pieces that are not whole pages go through the page cache: a direct
        read would overwrite what follows them in the slot."""
        return os.O_NOFOLLOW | (os.O_DIRECT if self.direct and shape.piece_bytes % BLOCK == 0 else 0)

    def path(self, key: bytes, fingerprint: bytes) -> Path:
        """The path of the chunk's file, whether it exists or not."""
        return self.root / folder_name(fingerprint) / key.hex()

    def recover(self) -> Recovery:
        """List the files; delete temporary and foreign ones. Raises OSError when the directory cannot be made or
        read."""
        self._open()
        return recover(self.root, self._keys, self.encoded)

    def read(
        self, shape: KvShape, pieces: Sequence[FetchPiece], sums: dict[int, int] | None = None
    ) -> dict[int, Fault]:
        """Read consecutive pieces of one chunk into the arena and verify them. Returns the faults by index; empty: all
        are good.

        Mutates `sums`: by index, the arena's checksums of the pieces.
        """
        answer: queue.SimpleQueue[dict[int, Fault]] = queue.SimpleQueue()
        self.begin_read(shape, pieces, answer.put, sums)
        return answer.get()

    def begin_read(
        self,
        shape: KvShape,
        pieces: Sequence[FetchPiece],
        done: Done,
        sums: dict[int, int] | None = None,
        given_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """Like `read`, without blocking: `done(faults)` is called on a reading thread. A read that is `given_up` before
        it begins ends with CANCELLED."""
        key, sums = pieces[0].key, {} if sums is None else sums
        if self.encoded.has(key):
            self.encoded.begin_read(self.path(key, shape.fingerprint), key, pieces, sums, done, given_up)
        elif pieces[0].checksum != UNREAD:
            self._reads.begin(Read(shape, pieces, done, sums, given_up))
        elif (digests := self._digests.get(key)) is not None:
            self._reads.begin(Read(shape, _expecting(digests, pieces), done, sums, given_up))
        else:
            self._header_readers.submit(self._begin_unread, shape, pieces, done, sums, given_up)

    def _begin_unread(
        self,
        shape: KvShape,
        pieces: Sequence[FetchPiece],
        done: Done,
        sums: dict[int, int],
        given_up: Callable[[], bool],
    ) -> None:
        """Read and check the header of a file that was only listed, then begin the read. On a thread of its own."""
        key = pieces[0].key
        try:
            header = self.header(key, shape)
            # A file that this process cannot decode is as good as missing, and stays.
            fault = None if self.encoded.found(header) else Fault.MISSING
            if given_up():
                fault = Fault.CANCELLED
        except Exception as e:
            fault = fault_of(e, opened=True)
        if fault is not None:
            done(dict.fromkeys(range(len(pieces)), fault))
        elif self.encoded.has(key):
            self.encoded.begin_read(self.path(key, shape.fingerprint), key, pieces, sums, done, given_up)
        else:
            while len(self._digests) >= _HEADERS_KEPT:
                self._digests.pop(next(iter(self._digests)), None)
            self._digests[key] = header.checksums
            self._reads.begin(Read(shape, _expecting(header.checksums, pieces), done, sums, given_up))

    def header(self, key: bytes, shape: KvShape) -> Header:
        """The header of the chunk's file, read and checked. Raises PieceLost, OSError."""
        found = header_of(self._keys, self.path(key, shape.fingerprint))
        if found.shape != shape:
            raise PieceLost("the header has another shape")
        return found

    def _open_chunk(self, key: bytes, shape: KvShape) -> int:
        folder = self._folders.get(shape.fingerprint)
        if folder is None:
            folder = self._folders[shape.fingerprint] = str(self.root / folder_name(shape.fingerprint))
        return os.open(f"{folder}/{key.hex()}", os.O_RDONLY | self._flags(shape))

    def try_read(self, size: int) -> bool:
        """Whether `size` bytes of some file can be read; they are not verified."""
        try:
            folders = [p for p in self.root.iterdir() if p.is_dir() and not p.is_symlink()]
            for folder in folders:
                with os.scandir(folder) as entries:
                    found = next((e.path for e in entries if e.is_file(follow_symlinks=False)), None)
                if found is not None:
                    fd = os.open(found, os.O_RDONLY | os.O_NOFOLLOW)
                    try:
                        os.pread(fd, size, 0)
                        reach("ssd.after_read")
                    finally:
                        os.close(fd)
                    break
        except OSError:
            return False
        return True

    def try_write(self, size: int) -> Wrote:
        """Whether a file of `size` bytes can be written, synced and removed."""
        path = self.root / f"trial{_TEMPORARY}"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            try:
                for start in range(0, size, _TRIAL_BLOCK):
                    if os.write(fd, bytes(min(_TRIAL_BLOCK, size - start))) < min(_TRIAL_BLOCK, size - start):
                        return Wrote.FULL
                os.fdatasync(fd)
            finally:
                os.close(fd)
                path.unlink(missing_ok=True)
        except OSError as e:
            return write_outcome(e)
        return Wrote.OK

    def write(
        self,
        chunks: Sequence[WriteSsd],
        secrets: Mapping[bytes, SessionSecret] = MappingProxyType({}),
        headers: dict[bytes, Header] | None = None,
    ) -> list[Wrote]:
        """One group commit. Returns the outcome of each chunk; chunks that are not durable leave no file.

        secrets: by chunk key, the key to encrypt with; chunks without one are not encrypted. Mutates `headers`: by
        chunk key, the header of every file.
        """
        headers = {} if headers is None else headers
        done = [Wrote.FAILED] * len(chunks)
        temporary: dict[int, Path] = {}
        descriptors: dict[int, int] = {}
        try:
            self._write_all(chunks, secrets, headers, temporary, descriptors, done)
            reach("ssd.before_sync")
            synced = dict(zip(descriptors, self._sync.map(sync_file, descriptors.values()), strict=True))
            reach("ssd.before_rename")
            folders: set[Path] = set()
            for i, error in synced.items():
                if error is not None:
                    done[i] = write_outcome(error)
                    continue
                final = self.path(chunks[i].key, chunks[i].shape.fingerprint)
                try:
                    temporary[i].rename(final)
                except OSError as e:
                    done[i] = write_outcome(e)
                    continue
                del temporary[i]
                self.encoded.settle(chunks[i].key)
                self._digests.pop(chunks[i].key, None)
                reach("ssd.renamed")
                folders.add(final.parent)
                done[i] = Wrote.OK
            reach("ssd.before_folder_sync")
            for folder in folders:
                try:
                    sync_folder(folder)
                except OSError as e:
                    done = [write_outcome(e) if outcome is Wrote.OK else outcome for outcome in done]
        finally:
            self.encoded.written()
            for fd in descriptors.values():
                os.close(fd)
            for path in temporary.values():
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
        return done

    def _write_all(
        self,
        chunks: Sequence[WriteSsd],
        secrets: Mapping[bytes, SessionSecret],
        headers: dict[bytes, Header],
        temporary: dict[int, Path],
        descriptors: dict[int, int],
        done: list[Wrote],
    ) -> None:
        """Write temporary files, several at a time. Mutates `headers`, `temporary` (all files made), `descriptors` (of
        complete ones) and `done` (outcome of the others)."""
        moving: dict[int, tuple[int, Moving]] = {}

        def settle(limit: int) -> None:
            pause_s = POLL_S
            while len(moving) > limit:
                for i, (fd, transfer) in list(moving.items()):
                    try:
                        if not transfer.ended():
                            continue
                        descriptors[i] = fd
                    except OSError as e:
                        done[i] = write_outcome(e)
                        os.close(fd)
                    del moving[i]
                # No request waits for a write, so it is polled rarely.
                if len(moving) > limit:
                    time.sleep(pause_s)
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

        # Hashing and encrypting take longer than starting a write, so they go ahead on several threads.
        prepared = [self._preparing.submit(self._prepare, chunk, secrets.get(chunk.key)) for chunk in chunks]
        for i, chunk in enumerate(chunks):
            settle(self._writer.depth - 1)
            shape = chunk.shape
            stored, header = prepared[i].result()
            try:
                path = self._folder(shape) / (chunk.key.hex() + _TEMPORARY)
                flags = self._flags(shape) if stored is None else os.O_NOFOLLOW
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | flags, 0o600)
            except OSError as e:
                done[i] = write_outcome(e)
                continue
            temporary[i] = path
            try:
                headers[chunk.key] = header
                if stored is not None:
                    reach("ssd.part_made")
                    write_object(fd, stored)
                    descriptors[i] = fd
                    continue
                os.ftruncate(fd, object_bytes(shape))
                reach("ssd.part_made")
                parts = [
                    Part(piece_offset(shape, layer), offset, shape.piece_bytes)
                    for layer, offset in enumerate(chunk.offsets)
                ]
                moving[i] = fd, self._writer.begin("WRITE", fd, parts, encode_header(self._keys, header))
            except OSError as e:
                done[i] = write_outcome(e)
                os.close(fd)
        settle(0)

    def _prepare(self, chunk: WriteSsd, secret: SessionSecret | None) -> tuple[StoredChunk | None, Header]:
        """What the chunk's file will be, None if its pieces are written as they are in the arena; and its header."""
        stored = self.encoded.encode(chunk, secret)
        if stored is not None:
            return stored, stored.header
        size = chunk.shape.piece_bytes
        digests = self._keys.digests(views(self._arena, chunk.shape, chunk.offsets), chunk.key)
        sums = self._arena.checksums([(offset, size) for offset in chunk.offsets])
        damaged = {i for i, (found, wanted) in enumerate(zip(sums, chunk.checksums, strict=True)) if found != wanted}
        return None, Header(chunk.key, chunk.shape, raw_layout(chunk.shape), refuted(digests, damaged))

    def _folder(self, shape: KvShape) -> Path:
        folder = self.root / folder_name(shape.fingerprint)
        if not folder.exists():
            folder.mkdir(parents=True, exist_ok=True)
            sync_folder(self.root)
        return folder

    def delete(self, key: bytes, fingerprint: bytes) -> None:
        """Remove the chunk's file, if it exists."""
        reach("ssd.before_delete")
        self.path(key, fingerprint).unlink(missing_ok=True)
        self.encoded.forget(key)
        self._digests.pop(key, None)
        reach("ssd.after_delete")

    def close(self) -> None:
        """Stop the threads."""
        self._reads.close()
        self.encoded.close()
        self._header_readers.shutdown(wait=False)
        self._sync.shutdown(wait=False)
        self._preparing.shutdown(wait=False)


def _expecting(digests: Sequence[int], pieces: Sequence[FetchPiece]) -> list[FetchPiece]:
    """The pieces, to be verified with a header's digests."""
    return [replace(p, checksum=digests[p.layer]) for p in pieces]
