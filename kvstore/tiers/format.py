"""A chunk as an object on the SSD and in the blob tier: a header, then the pieces in layer order, each 4 KiB aligned.

The header is 4 KiB, or the next multiple that holds a checksum a layer: magic, format version, its own length, chunk key,
model fingerprint, shape, one xxh3-64 a piece, padding, and in its last 8 bytes the xxh3-64 of all of itself before them.
So "the first m layers" is one range, and recovery reads headers only. Little-endian throughout.
"""

from __future__ import annotations

import struct

import xxhash

from contracts.errors import PieceLost
from contracts.kv import DTYPE_BYTES, KvShape

MAGIC = b"UPBEATKV"
VERSION = 1
BLOCK = 4096
_FIXED = struct.Struct("<8sII32s32sIIII16s")
_SUM = struct.Struct("<Q")
#: Above these a header is nonsense, whatever its checksum says.
_MAX_LAYERS, _MAX_PIECE_BYTES = 1 << 14, 1 << 30


def header_bytes(layers: int) -> int:
    """Length of the header of a chunk of so many layers."""
    return -(-(_FIXED.size + _SUM.size * (layers + 1)) // BLOCK) * BLOCK


def piece_offset(shape: KvShape, layer: int) -> int:
    """Where a layer's piece begins in the object."""
    return header_bytes(shape.layers) + layer * (-(-shape.piece_bytes // BLOCK) * BLOCK)


def object_bytes(shape: KvShape) -> int:
    """Length of the object: header and padded pieces."""
    return piece_offset(shape, shape.layers)


def encode_header(key: bytes, shape: KvShape, checksums: tuple[int, ...]) -> bytes:
    """The header of a chunk; `checksums` is one xxh3-64 a layer."""
    if len(key) != 32 or len(shape.fingerprint) != 32 or len(checksums) != shape.layers:
        raise ValueError("a header needs a 32-byte key and fingerprint and one checksum a layer")
    length = header_bytes(shape.layers)
    geometry = (shape.layers, shape.kv_heads, shape.head_dim, shape.chunk_tokens, shape.dtype.encode())
    fixed = _FIXED.pack(MAGIC, VERSION, length, key, shape.fingerprint, *geometry)
    body = (fixed + struct.pack(f"<{shape.layers}Q", *checksums)).ljust(length - _SUM.size, b"\0")
    return body + _SUM.pack(xxhash.xxh3_64_intdigest(body))


def header_length(start: bytes | memoryview) -> int:
    """Length of the header that begins with `start` (at least BLOCK bytes). Raises PieceLost when this is no header."""
    if len(start) < BLOCK or bytes(start[: len(MAGIC)]) != MAGIC:
        raise PieceLost("not a chunk")
    _, version, length, _, _, layers, *_ = _FIXED.unpack_from(start)
    if version != VERSION or not 1 <= layers <= _MAX_LAYERS or length != header_bytes(layers):
        raise PieceLost("unknown format version or impossible length")
    return int(length)


def decode_header(header: bytes | memoryview) -> tuple[bytes, KvShape, tuple[int, ...]]:
    """(key, shape, checksums). Every field is checked before it is trusted. Raises PieceLost when anything is odd."""
    length = header_length(header)
    if len(header) < length:
        raise PieceLost("short header")
    body = bytes(header[: length - _SUM.size])
    if xxhash.xxh3_64_intdigest(body) != _SUM.unpack_from(header, length - _SUM.size)[0]:
        raise PieceLost("header checksum")
    _, _, _, key, fingerprint, layers, kv_heads, head_dim, chunk_tokens, dtype = _FIXED.unpack_from(body)
    name = dtype.rstrip(b"\0").decode("ascii", "replace")
    if name not in DTYPE_BYTES or not min(kv_heads, head_dim, chunk_tokens):
        raise PieceLost("impossible shape")
    shape = KvShape(fingerprint, layers, kv_heads, head_dim, chunk_tokens, name)
    if shape.piece_bytes > _MAX_PIECE_BYTES:
        raise PieceLost("impossible shape")
    return key, shape, struct.unpack_from(f"<{layers}Q", body, _FIXED.size)
