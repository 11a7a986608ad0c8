"""The SSD tier: a file a chunk, `ssd/<first half of the fingerprint>/<key>`, written in group commits, recovered by headers.

A chunk is visible exactly when it is whole and durable: it is written to a temporary name, synced, renamed, and its
directory synced, many chunks at a time. Recovery deletes what is not whole.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from contracts.errors import PieceLost
from contracts.kv import KvShape
from kvstore.core.events import Fault, FoundCopy
from kvstore.core.instructions import FetchPiece, WriteSsd
from kvstore.failpoints import reach
from kvstore.tiers.arena import Arena
from kvstore.tiers.file_io import FileIo, Part
from kvstore.tiers.format import (
    BLOCK,
    RAW,
    Header,
    decode_header,
    encode_header,
    header_bytes,
    header_length,
    object_bytes,
    piece_offset,
)

_TEMPORARY = ".part"
_SYNC_THREADS = 4


def folder_name(fingerprint: bytes) -> str:
    """The part of a chunk's path that names its model, on disk and in blob."""
    return fingerprint.hex()[:16]


@dataclass(slots=True)
class Recovery:
    """What was found at start."""

    copies: list[FoundCopy]
    deleted: int


class SsdTier:
    """Blocking; the shell calls it from threads. Reads and writes use their own FileIo, as each serves its own thread."""

    def __init__(self, root: Path, arena: Arena, reader: FileIo, writer: FileIo) -> None:
        self.root = root
        self._arena = arena
        self._reader = reader
        self._writer = writer
        self._sync = ThreadPoolExecutor(_SYNC_THREADS, thread_name_prefix="ssd-sync")
        root.mkdir(parents=True, exist_ok=True)

    @property
    def read_threads(self) -> int:
        """By how many threads `read` may be called at a time."""
        return self._reader.threads

    def path(self, key: bytes, fingerprint: bytes) -> Path:
        """Where the chunk's file is or would be."""
        return self.root / folder_name(fingerprint) / key.hex()

    def recover(self) -> Recovery:
        """Read every header; delete temporary, foreign, short and damaged files."""
        recovery = Recovery([], 0)
        for path in self._files():
            reach("recover.between_files")
            try:
                found = self._recover_one(path)
            except (PieceLost, OSError, ValueError):
                path.unlink(missing_ok=True)
                recovery.deleted += 1
                continue
            if found.layout.codec == RAW:
                recovery.copies.append(FoundCopy(found.key, found.shape, found.checksums))
        return recovery

    def _files(self) -> Iterator[Path]:
        for folder in sorted(p for p in self.root.iterdir() if p.is_dir() and not p.is_symlink()):
            with os.scandir(folder) as entries:
                yield from [Path(e.path) for e in entries if not e.is_dir(follow_symlinks=False)]

    def _recover_one(self, path: Path) -> Header:
        key_named = bytes.fromhex(path.name)
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            start = os.pread(fd, BLOCK, 0)
            length = header_length(start)
            header = start if length == BLOCK else os.pread(fd, length, 0)
            found = decode_header(header)
            here = found.key == key_named and folder_name(found.shape.fingerprint) == path.parent.name
            if not here or os.fstat(fd).st_size != found.layout.object_bytes:
                raise PieceLost("name, model or length do not match the header")
        finally:
            os.close(fd)
        return found

    def read(self, shape: KvShape, pieces: Sequence[FetchPiece]) -> dict[int, Fault]:
        """Pieces of one chunk into the arena, verified. Returns the faults by index; none: all are good."""
        try:
            fd = os.open(self.path(pieces[0].key, shape.fingerprint), os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return dict.fromkeys(range(len(pieces)), Fault.MISSING)
        except OSError:
            return dict.fromkeys(range(len(pieces)), Fault.UNAVAILABLE)
        try:
            self._reader.read(fd, [Part(piece_offset(shape, p.layer), p.offset, shape.piece_bytes) for p in pieces])
            reach("ssd.after_read")
        except PieceLost:
            return dict.fromkeys(range(len(pieces)), Fault.CORRUPT)
        except OSError as e:
            # A medium error stays: the copy is of no use. Anything else may pass.
            return dict.fromkeys(range(len(pieces)), Fault.CORRUPT if e.errno == errno.EIO else Fault.UNAVAILABLE)
        finally:
            os.close(fd)
        return verify(self._arena, shape, pieces)

    def write(self, chunks: Sequence[WriteSsd]) -> list[bool]:
        """One group commit. Which of the chunks are durable now; the others left nothing behind."""
        done = [False] * len(chunks)
        temporary: dict[int, Path] = {}
        descriptors: dict[int, int] = {}
        try:
            for i, chunk in enumerate(chunks):
                try:
                    temporary[i], descriptors[i] = self._write_one(chunk)
                except OSError:
                    continue
            reach("ssd.before_sync")
            synced = dict(zip(descriptors, self._sync.map(_sync, descriptors.values()), strict=True))
            reach("ssd.before_rename")
            folders: set[Path] = set()
            for i, ok in synced.items():
                if not ok:
                    continue
                final = self.path(chunks[i].key, chunks[i].shape.fingerprint)
                try:
                    temporary[i].rename(final)
                except OSError:
                    continue
                del temporary[i]
                reach("ssd.renamed")
                folders.add(final.parent)
                done[i] = True
            reach("ssd.before_folder_sync")
            for folder in folders:
                _sync_folder(folder)
        finally:
            for fd in descriptors.values():
                os.close(fd)
            for path in temporary.values():
                path.unlink(missing_ok=True)
        return done

    def _write_one(self, chunk: WriteSsd) -> tuple[Path, int]:
        shape = chunk.shape
        folder = self.root / folder_name(shape.fingerprint)
        if not folder.exists():
            folder.mkdir(parents=True, exist_ok=True)
            _sync_folder(self.root)
        path = folder / (chunk.key.hex() + _TEMPORARY)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        try:
            os.ftruncate(fd, object_bytes(shape))
            os.pwrite(fd, encode_header(chunk.key, shape, chunk.checksums), 0)
            reach("ssd.header_written")
            self._writer.write(
                fd, [Part(piece_offset(shape, layer), offset, shape.piece_bytes) for layer, offset in enumerate(chunk.offsets)]
            )
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        return path, fd

    def delete(self, key: bytes, fingerprint: bytes) -> None:
        """Remove the chunk's file; nothing when there is none."""
        reach("ssd.before_delete")
        self.path(key, fingerprint).unlink(missing_ok=True)
        reach("ssd.after_delete")

    def close(self) -> None:
        """Stop the sync threads."""
        self._sync.shutdown(wait=False)


def verify(arena: Arena, shape: KvShape, pieces: Sequence[FetchPiece]) -> dict[int, Fault]:
    """Which of the pieces that were just brought are not what they should be."""
    return {i: Fault.CORRUPT for i, p in enumerate(pieces) if arena.checksum(p.offset, shape.piece_bytes) != p.checksum}


def chunk_object(arena: Arena, chunk_key: bytes, shape: KvShape, offsets: Sequence[int], checksums: tuple[int, ...]) -> bytes:
    """The whole object of a chunk in the arena, as it is written to the blob tier when the SSD does not have it."""
    stride = piece_offset(shape, 1) - header_bytes(shape.layers)
    parts = [encode_header(chunk_key, shape, checksums)]
    for offset in offsets:
        parts.append(bytes(arena.view[offset : offset + shape.piece_bytes]).ljust(stride, b"\0"))
    return b"".join(parts)


def _sync(fd: int) -> bool:
    try:
        os.fdatasync(fd)
    except OSError:
        return False
    return True


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
