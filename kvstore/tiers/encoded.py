"""Encodes a chunk from pieces in the arena to the bytes of an object, and back.

Only verified pieces are encoded, because otherwise damage would get a valid checksum: a damaged piece makes its chunk
raw, with the checksum it should have, so that its reader finds the damage. Only verified bytes are decoded.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from contracts.errors import PieceLost
from contracts.kv import KvShape
from kvstore.core.events import Fault
from kvstore.core.instructions import FetchPiece
from kvstore.metrics import count
from kvstore.tiers.arena import Arena
from kvstore.tiers.codec import Codec, Unencodable
from kvstore.tiers.format import Header, Layout, encode_header, raw_layout

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A chunk as an object: its header and the stored bytes of each piece."""

    header: Header
    pieces: Sequence[Buffer]

    def to_bytes(self) -> bytes:
        """The whole object, with padding."""
        layout = self.header.layout
        parts: list[Buffer] = [encode_header(self.header.key, self.header.shape, self.header.checksums, layout)]
        for piece, start, end in zip(self.pieces, layout.offsets[:-1], layout.offsets[1:], strict=True):
            parts += [piece, bytes(end - start - len(piece))]
        return b"".join(parts)


def views(arena: Arena, shape: KvShape, offsets: Sequence[int]) -> list[memoryview]:
    """The pieces at these offsets of the arena."""
    return [arena.view[offset : offset + shape.piece_bytes] for offset in offsets]


def encode_chunk(
    key: bytes, shape: KvShape, pieces: Sequence[memoryview], checksums: tuple[int, ...], codec: Codec | None
) -> StoredChunk:
    """The chunk encoded by `codec`; raw without one, if pieces are not K and V of heads, or if encoding fails or saves
    nothing. checksums: of `pieces`."""
    if codec is not None:
        stored = _encode(shape, pieces, checksums, codec) if shape.is_of_heads else None
        if stored is not None:
            layout = Layout(codec.name, [len(s) for s in stored])
            return StoredChunk(Header(key, shape, layout, tuple(map(xxhash.xxh3_64_intdigest, stored))), stored)
        count("chunks_stored_raw")
    return StoredChunk(Header(key, shape, raw_layout(shape), checksums), pieces)


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


def decode_pieces(
    arena: Arena,
    codec: Codec,
    shape: KvShape,
    layout: Layout,
    pieces: Sequence[FetchPiece],
    stored: memoryview,
    start: int,
    sums: dict[int, int],
) -> dict[int, Fault]:
    """Decode pieces from `stored`, the object's bytes from `start` on, into the arena. Returns the faults by index.

    Mutates `sums`: by index, the arena's checksums of the decoded pieces.
    """
    faults: dict[int, Fault] = {}
    for i, piece in enumerate(pieces):
        at, length = layout.offsets[piece.layer] - start, layout.lengths[piece.layer]
        try:
            into = arena.view[piece.offset : piece.offset + shape.piece_bytes]
            _decode(codec, shape, piece.layer, stored[at : at + length], length, piece.checksum, into)
            sums[i] = arena.checksum(piece.offset, shape.piece_bytes)
        except PieceLost:
            faults[i] = Fault.CORRUPT
        except Exception:
            count("codec_failures")
            faults[i] = Fault.UNAVAILABLE
    return faults


def load_chunk(fd: int, header: Header, codec: Codec | None) -> tuple[list[memoryview], tuple[int, ...]]:
    """All pieces of an object in a file, decoded, and their checksums. Raises PieceLost, OSError."""
    shape, layout = header.shape, header.layout
    pieces: list[memoryview] = []
    for layer, (offset, length) in enumerate(zip(layout.offsets[:-1], layout.lengths, strict=True)):
        piece = memoryview(bytearray(shape.piece_bytes))
        _decode(codec, shape, layer, read_range(fd, offset, length), length, header.checksums[layer], piece)
        pieces.append(piece)
    return pieces, tuple(map(xxhash.xxh3_64_intdigest, pieces))


def _decode(
    codec: Codec | None, shape: KvShape, layer: int, stored: memoryview, length: int, checksum: int, into: memoryview
) -> None:
    if len(stored) != length or (codec is None and length != len(into)) or xxhash.xxh3_64_intdigest(stored) != checksum:
        raise PieceLost("checksum of a stored piece")
    if codec is None:
        into[:] = stored
    else:
        codec.decode(stored, into, shape, layer)


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
