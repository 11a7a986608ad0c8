"""The format of a chunk on the SSD and in the blob tier: a header, then the pieces in layer order, each 4 KiB aligned.

The header is 4 KiB, or the next multiple that holds 12 bytes a layer: magic, format version, its own length, chunk key,
model fingerprint, shape, the codec's name, a checksum and a length per piece, padding, and in its last 8 bytes the
xxh3-64 of everything before. A piece's checksum is the xxh3-64 of its stored bytes, so nothing unverified reaches a
decoder; padding is never served. So the first m layers are one range, and recovery reads headers only. With the codec
"raw" a piece has the arena's bytes and the shape's `piece_bytes`; other codecs accept only K and V of heads, whose size
follows from heads and dtype. Little-endian throughout.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import xxhash

from contracts.errors import InvalidRequest, PieceLost
from contracts.kv import DTYPE_BYTES, MAX_LAYERS, KvShape, check_shape

MAGIC = b"UPBEATKV"
VERSION = 2
BLOCK = 4096
RAW = "raw"
_FIXED = struct.Struct("<8sII32s32sIIII16s16s")
_SUM = struct.Struct("<Q")
#: Per layer: checksum and stored length.
_PIECE = struct.Struct("<QI")
_CODEC_NAME = re.compile(r"[a-z0-9-]{1,16}")


def _padded(length: int) -> int:
    return -(-length // BLOCK) * BLOCK


class Layout:
    """An object's codec, and the offset and length of each piece. Immutable."""

    __slots__ = ("codec", "lengths", "offsets")

    def __init__(self, codec: str, lengths: Sequence[int]) -> None:
        self.codec = codec
        self.lengths = tuple(lengths)
        self.offsets = tuple(accumulate(map(_padded, lengths), initial=header_bytes(len(self.lengths))))

    @property
    def object_bytes(self) -> int:
        """Length of the object: header and padded pieces."""
        return self.offsets[-1]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and (self.codec, self.lengths) == (other.codec, other.lengths)

    def __hash__(self) -> int:
        return hash((self.codec, self.lengths))


@dataclass(frozen=True, slots=True)
class Header:
    """A decoded header. checksums: one xxh3-64 per layer, of the stored piece."""

    key: bytes
    shape: KvShape
    layout: Layout
    checksums: tuple[int, ...]


def header_bytes(layers: int) -> int:
    """Length of the header of a chunk with this many layers."""
    return _padded(_FIXED.size + _PIECE.size * layers + _SUM.size)


#: Interned: most codecs give all chunks of a model the same layout.
_shared_layout = lru_cache(256)(Layout)


@lru_cache(64)
def raw_layout(shape: KvShape) -> Layout:
    """The layout of a raw object."""
    return Layout(RAW, [shape.piece_bytes] * shape.layers)


def piece_offset(shape: KvShape, layer: int) -> int:
    """Where a layer's piece begins in a raw object."""
    return header_bytes(shape.layers) + layer * _padded(shape.piece_bytes)


def object_bytes(shape: KvShape) -> int:
    """Length of a raw object."""
    return piece_offset(shape, shape.layers)


def encode_header(key: bytes, shape: KvShape, checksums: tuple[int, ...], layout: Layout | None = None) -> bytes:
    """The header of a chunk. checksums: one xxh3-64 per layer. layout: raw by default."""
    layout = layout or raw_layout(shape)
    if (
        len(key) != 32
        or len(shape.fingerprint) != 32
        or len(checksums) != shape.layers
        or len(layout.lengths) != shape.layers
    ):
        raise ValueError("a header needs a 32-byte key and fingerprint, and one checksum and length a layer")
    length = header_bytes(shape.layers)
    geometry = (
        shape.layers,
        shape.kv_heads,
        shape.head_dim,
        shape.chunk_tokens,
        shape.dtype.encode(),
        layout.codec.encode(),
    )
    fixed = _FIXED.pack(MAGIC, VERSION, length, key, shape.fingerprint, *geometry)
    pieces = b"".join(map(_PIECE.pack, checksums, layout.lengths))
    body = (fixed + pieces).ljust(length - _SUM.size, b"\0")
    return body + _SUM.pack(xxhash.xxh3_64_intdigest(body))


def header_length(start: bytes | memoryview) -> int:
    """Length of the header that begins with `start` (at least BLOCK bytes). Raises PieceLost when it is not a
    header."""
    if len(start) < BLOCK or bytes(start[: len(MAGIC)]) != MAGIC:
        raise PieceLost("not a chunk")
    _, version, length, _, _, layers, *_ = _FIXED.unpack_from(start)
    if version != VERSION or not 1 <= layers <= MAX_LAYERS or length != header_bytes(layers):
        raise PieceLost("unknown format version or impossible length")
    return int(length)


def decode_header(header: bytes | memoryview) -> Header:
    """The header's content, fully validated. Raises PieceLost when invalid.

    The codec's name is well-formed, but may be unknown to this process.
    """
    length = header_length(header)
    if len(header) < length:
        raise PieceLost("short header")
    body = bytes(header[: length - _SUM.size])
    if xxhash.xxh3_64_intdigest(body) != _SUM.unpack_from(header, length - _SUM.size)[0]:
        raise PieceLost("header checksum")
    _, _, _, key, fingerprint, layers, kv_heads, head_dim, chunk_tokens, dtype, codec = _FIXED.unpack_from(body)
    name, codec = (field.rstrip(b"\0").decode("ascii", "replace") for field in (dtype, codec))
    end = _FIXED.size + layers * _PIECE.size
    checksums, lengths = zip(*_PIECE.iter_unpack(body[_FIXED.size : end]), strict=True)
    geometry = fingerprint, layers, kv_heads, head_dim, chunk_tokens, name
    if not _CODEC_NAME.fullmatch(codec) or (codec != RAW and name not in DTYPE_BYTES):
        raise PieceLost("impossible codec")
    try:
        shape = check_shape(KvShape(*geometry, lengths[0]) if codec == RAW else KvShape.of_heads(*geometry))
    except InvalidRequest as e:
        raise PieceLost(f"impossible shape: {e}") from e
    layout = raw_layout(shape)
    if codec != RAW:
        layout = _shared_layout(codec, lengths)
    if layout.lengths != lengths or not min(lengths) or max(lengths) > shape.piece_bytes:
        raise PieceLost("impossible lengths")
    return Header(key, shape, layout, checksums)
