"""Encodes a chunk from pieces in the arena to the bytes of an object, and back.

Pieces are verified before they get a digest, because otherwise damage would get a valid one: a damaged piece makes its
chunk raw, with a digest that is wrong, so that its readers find the damage. Only verified bytes are decoded.
"""

from __future__ import annotations

import os
from collections.abc import Container, Sequence
from dataclasses import dataclass

import xxhash

from contracts.errors import PieceLost
from contracts.kv import KvShape
from kvstore.core.events import Fault
from kvstore.core.instructions import FetchPiece
from kvstore.metrics import count
from kvstore.tiers.arena import Arena
from kvstore.tiers.cluster_keys import Buffer, ClusterKeys
from kvstore.tiers.codec import Codec, Unencodable
from kvstore.tiers.format import BLOCK, Header, Layout, decode_header, encode_header, header_length, raw_layout
from kvstore.tiers.sealing import Sealer, SessionSecret, seal_pieces


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A chunk as an object: its header, the header's bytes, and the stored bytes of each piece."""

    header: Header
    head: bytes
    pieces: Sequence[Buffer]

    def to_bytes(self) -> bytes:
        """The whole object, with padding."""
        layout = self.header.layout
        parts: list[Buffer] = [self.head]
        for piece, start, end in zip(self.pieces, layout.offsets[:-1], layout.offsets[1:], strict=True):
            parts += [piece, bytes(end - start - len(piece))]
        return b"".join(parts)


def views(arena: Arena, shape: KvShape, offsets: Sequence[int]) -> list[memoryview]:
    """The pieces at these offsets of the arena."""
    return [arena.view[offset : offset + shape.piece_bytes] for offset in offsets]


def encode_chunk(
    keys: ClusterKeys,
    key: bytes,
    shape: KvShape,
    pieces: Sequence[memoryview],
    checksums: tuple[int, ...],
    codec: Codec | None = None,
    secret: SessionSecret | None = None,
) -> StoredChunk:
    """The chunk as it is stored: encoded by `codec`, then encrypted with `secret`, where given. Raw if pieces are not K
    and V of heads, or if encoding fails or saves nothing. checksums: xxh3-64 of `pieces`."""
    encoded = _encode(shape, pieces, checksums, codec) if codec is not None and shape.is_of_heads else None
    if codec is not None and encoded is not None:
        layout, damaged = Layout(codec.name, [len(e) for e in encoded]), set[int]()
    else:
        layout = raw_layout(shape)
        damaged = {i for i, piece in enumerate(pieces) if xxhash.xxh3_64_intdigest(piece) != checksums[i]}
        if codec is not None:
            count("chunks_stored_raw")
    stored = pieces if encoded is None else encoded
    seal = None
    digests: Sequence[int]
    if secret is not None:
        stored, digests, seal = seal_pieces(secret, key, stored)
    else:
        digests = keys.digests(stored, key)
    header = Header(key, shape, layout, refuted(digests, damaged), seal)
    return StoredChunk(header, encode_header(keys, header), stored)


def refuted(digests: Sequence[int], damaged: Container[int]) -> tuple[int, ...]:
    """The digests, wrong where a piece was `damaged` before it was written, so that its readers refuse it."""
    return tuple(digest ^ (layer in damaged) for layer, digest in enumerate(digests))


def _encode(
    shape: KvShape, pieces: Sequence[memoryview], checksums: tuple[int, ...], codec: Codec
) -> list[memoryview] | None:
    stored: list[memoryview] = []
    for layer, (piece, checksum) in enumerate(zip(pieces, checksums, strict=True)):
        try:
            stored.append(codec.encode(piece, shape, layer))
        except Unencodable:
            return None
        except Exception:  # third-party code; for example a device without memory
            count("codec_failures")
            return None
        if len(stored[-1]) > shape.piece_bytes or xxhash.xxh3_64_intdigest(piece) != checksum:
            return None
    return stored


class Opened:
    """Reads the stored pieces of one object. secret: of an encrypted one; codec: of one that is not raw."""

    def __init__(
        self, keys: ClusterKeys, header: Header, codec: Codec | None = None, secret: SessionSecret | None = None
    ) -> None:
        assert (header.seal is None) == (secret is None)
        self._keys, self._header, self._codec = keys, header, codec
        self._sealer = Sealer(secret, header.seal.salt, header.key) if secret is not None and header.seal else None

    def read(self, stored: Buffer, layer: int, checksum: int, into: memoryview) -> None:
        """Verify one piece's stored bytes, then decode them to `into`. Raises PieceLost; what is in `into` then may
        not be used. checksum: its digest."""
        header = self._header
        if len(stored) != header.layout.lengths[layer] or (self._codec is None and len(stored) != len(into)):
            raise PieceLost("length of a stored piece")
        if self._sealer is not None and header.seal is not None:
            plain = into if self._codec is None else memoryview(bytearray(len(stored)))
            self._sealer.open_into(stored, layer, (checksum, header.seal.rests[layer]), plain)
            stored = plain
        elif self._keys.digest(stored, header.key, layer) != checksum:
            raise PieceLost("digest of a stored piece")
        elif self._codec is None:
            into[:] = stored
        if self._codec is not None:
            self._codec.decode(memoryview(stored), into, header.shape, layer)


def decode_pieces(
    arena: Arena,
    opened: Opened,
    header: Header,
    pieces: Sequence[FetchPiece],
    stored: memoryview,
    start: int,
    sums: dict[int, int],
) -> dict[int, Fault]:
    """Read pieces from `stored`, the object's bytes from `start` on, into the arena. Returns the faults by index.

    Mutates `sums`: by index, the arena's checksums of the pieces.
    """
    faults: dict[int, Fault] = {}
    size, layout = header.shape.piece_bytes, header.layout
    for i, piece in enumerate(pieces):
        at, length = layout.offsets[piece.layer] - start, layout.lengths[piece.layer]
        try:
            opened.read(
                stored[at : at + length],
                piece.layer,
                piece.checksum,
                arena.view[piece.offset : piece.offset + size],
            )
        except PieceLost:
            faults[i] = Fault.CORRUPT
        except Exception:
            count("codec_failures")
            faults[i] = Fault.UNAVAILABLE
    good = [i for i in range(len(pieces)) if i not in faults]
    sums.update(zip(good, arena.checksums([(pieces[i].offset, size) for i in good]), strict=True))
    return faults


def load_chunk(fd: int, header: Header, opened: Opened) -> tuple[list[memoryview], tuple[int, ...]]:
    """All pieces of an object in a file, decoded, and their xxh3-64. Raises PieceLost, OSError."""
    shape, layout = header.shape, header.layout
    pieces: list[memoryview] = []
    for layer, (offset, length) in enumerate(zip(layout.offsets[:-1], layout.lengths, strict=True)):
        piece = memoryview(bytearray(shape.piece_bytes))
        opened.read(read_range(fd, offset, length), layer, header.checksums[layer], piece)
        pieces.append(piece)
    return pieces, tuple(map(xxhash.xxh3_64_intdigest, pieces))


def read_header(keys: ClusterKeys, fd: int) -> Header:
    """The header of an object in a file, whose length it matches. Raises PieceLost, OSError."""
    start = os.pread(fd, BLOCK, 0)
    length = header_length(start)
    header = decode_header(keys, start if length == BLOCK else os.pread(fd, length, 0))
    if os.fstat(fd).st_size != header.layout.object_bytes:
        raise PieceLost("length does not match the header")
    return header


def read_range(fd: int, start: int, length: int) -> memoryview:
    """A range of a file as new bytes; shorter where the file ends. Raises OSError."""
    data = memoryview(bytearray(length))
    filled = 0
    while filled < length and (moved := os.preadv(fd, [data[filled:]], start + filled)):
        filled += moved
    return data[:filled]


def write_object(fd: int, chunk: StoredChunk) -> None:
    """Write the object to an empty file. Raises OSError."""
    data = memoryview(chunk.to_bytes())
    written = 0
    while written < len(data):
        written += os.pwrite(fd, data[written:], written)
