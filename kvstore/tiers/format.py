"""The format of a chunk on the SSD and in the blob tier: a header, then the pieces in layer order, each 4 KiB aligned.

The header is 4 KiB, or the next multiple that holds 20 bytes a layer: magic, format version, its own length, chunk key,
model fingerprint, shape, the codec's name, the seal, per piece a digest, the rest of its tag and a length, padding, and
in its last 32 bytes the keyed hash of everything before (cluster_keys.py). So the first m layers are one range, and
recovery reads headers only. Padding is never served. Little-endian throughout.

The seal says how pieces are encrypted (sealing.py): the name of the session's key and a salt; all zero: they are not.
The digest of a piece that is not encrypted is 64 bits of the keyed hash of its stored bytes; of an encrypted one it is
the first half of its tag. Either is checked before a decoder sees the piece.

With the codec "raw" a piece has the arena's bytes and the shape's `piece_bytes`; other codecs accept only K and V of
heads, whose size follows from heads and dtype.

How the version changes: docs/design/0040.
"""

from __future__ import annotations

import hmac
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from contracts.errors import InvalidRequest, PieceLost
from contracts.kv import DTYPE_BYTES, MAX_LAYERS, KvShape, check_shape
from kvstore.tiers.cluster_keys import MAC_BYTES, ClusterKeys
from kvstore.tiers.key_names import NAME_BYTES, KeyName

MAGIC = b"UPBEATKV"
VERSION = 3
BLOCK = 4096
RAW = "raw"
SALT_BYTES = 16
_FIXED = struct.Struct(f"<8sII32s32sIIII16s16s{NAME_BYTES}s{SALT_BYTES}s")
#: Per layer: digest, rest of the tag, stored length.
_PIECE = struct.Struct("<QQI")
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
class Seal:
    """How pieces are encrypted. key: the name of the session's key. rests: the second half of each piece's tag."""

    key: KeyName
    salt: bytes
    rests: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Header:
    """A decoded header. checksums: the digest of each layer's piece. seal: None when pieces are not encrypted."""

    key: bytes
    shape: KvShape
    layout: Layout
    checksums: tuple[int, ...]
    seal: Seal | None = None


def header_bytes(layers: int) -> int:
    """Length of the header of a chunk with this many layers."""
    return _padded(_FIXED.size + _PIECE.size * layers + MAC_BYTES)


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


def encode_header(keys: ClusterKeys, header: Header) -> bytes:
    """The header's bytes."""
    shape, layout, seal = header.shape, header.layout, header.seal
    rests = seal.rests if seal is not None else (0,) * shape.layers
    per_layer = header.checksums, rests, layout.lengths
    if (
        len(header.key) != 32
        or len(shape.fingerprint) != 32
        or any(len(of_layers) != shape.layers for of_layers in per_layer)
    ):
        raise ValueError("a header needs a 32-byte key and fingerprint, and one digest and length a layer")
    length = header_bytes(shape.layers)
    fixed = _FIXED.pack(
        MAGIC,
        VERSION,
        length,
        header.key,
        shape.fingerprint,
        shape.layers,
        shape.kv_heads,
        shape.head_dim,
        shape.chunk_tokens,
        shape.dtype.encode(),
        layout.codec.encode(),
        seal.key.pack() if seal is not None else b"",
        seal.salt if seal is not None else b"",
    )
    pieces = b"".join(map(_PIECE.pack, *per_layer))
    body = (fixed + pieces).ljust(length - MAC_BYTES, b"\0")
    return body + keys.of_header(body)


def header_length(start: bytes | memoryview) -> int:
    """Length of the header that begins with `start` (at least BLOCK bytes). Raises PieceLost when it is not a
    header."""
    if len(start) < BLOCK or bytes(start[: len(MAGIC)]) != MAGIC:
        raise PieceLost("not a chunk")
    _, version, length, _, _, layers = _FIXED.unpack_from(start)[:6]
    if version != VERSION or not 1 <= layers <= MAX_LAYERS or length != header_bytes(layers):
        raise PieceLost("unknown format version or impossible length")
    return int(length)


def decode_header(keys: ClusterKeys, header: bytes | memoryview) -> Header:
    """The header's content, fully validated. Raises PieceLost when invalid.

    The codec's name is well-formed, but may be unknown to this process.
    """
    length = header_length(header)
    if len(header) < length:
        raise PieceLost("short header")
    body = bytes(header[: length - MAC_BYTES])
    if not hmac.compare_digest(keys.of_header(body), bytes(header[length - MAC_BYTES : length])):
        raise PieceLost("the header's authenticator is wrong")
    _, _, _, key, fingerprint, layers, kv_heads, head_dim, chunk_tokens, *rest = _FIXED.unpack_from(body)
    dtype, codec, key_name, salt = rest
    name, codec = (field.rstrip(b"\0").decode("ascii", "replace") for field in (dtype, codec))
    end = _FIXED.size + layers * _PIECE.size
    checksums, rests, lengths = zip(*_PIECE.iter_unpack(body[_FIXED.size : end]), strict=True)
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
    seal = Seal(KeyName.unpack(key_name), salt, rests) if any(key_name) else None
    return Header(key, shape, layout, checksums, seal)
