"""The KV cache's vocabulary: shapes, fingerprints, chunk keys, tiers, manifests.

Like vLLM and LMCache, chunk keys are chained hashes of tokens. They depend on content only, so they are valid on every
machine and after restarts, and on a secret per tenant, so tenants share no KV.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from blake3 import blake3

from contracts.errors import InvalidRequest
from contracts.ids import SessionKey
from contracts.memory.windows import longest_window, passed

#: Version of the piece layout `[kv_heads, 2, chunk_tokens, head_dim]`; part of every fingerprint.
LAYOUT_VERSION = 1
KEY_BYTES = 32
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
#: Upper limits of a received shape.
MAX_LAYERS, MAX_PIECE_BYTES = 1 << 14, 1 << 30
#: Of a manifest.
MAX_NOTE_BYTES = 1 << 20

_ROOT = bytes(KEY_BYTES)
#: Fits the header of a stored object.
_DTYPE = re.compile(r"[a-z0-9_]{1,16}")


@dataclass(frozen=True, slots=True)
class KvShape:
    """The KV geometry of one model on one device.

    fingerprint: 32 bytes over weights digest, adapter, dtype, layout version and `chunk_tokens`.

    piece_bytes: bytes of one layer of one chunk. `of_heads` computes it for K and V of every head; other layouts (a
    latent per token as in MLA, elements of another size than `dtype`) set it. Only codecs use heads and dtype.

    windows: of each layer, how many of the last tokens (itself included) a token sees; 0: all. Empty: no layer has a
    window, or it is not known. It says what is read, not what a piece is: shapes that differ in it are equal.
    """

    fingerprint: bytes
    layers: int
    kv_heads: int
    head_dim: int
    chunk_tokens: int
    dtype: str
    piece_bytes: int
    windows: tuple[int, ...] = field(default=(), compare=False)

    @classmethod
    def of_heads(
        cls,
        fingerprint: bytes,
        layers: int,
        kv_heads: int,
        head_dim: int,
        chunk_tokens: int,
        dtype: str,
        windows: tuple[int, ...] = (),
    ) -> KvShape:
        """A shape whose pieces are `[kv_heads, 2 (K, V), chunk_tokens, head_dim]`. Raises KeyError when `dtype` is not
        in DTYPE_BYTES."""
        piece_bytes = kv_heads * 2 * chunk_tokens * head_dim * DTYPE_BYTES[dtype]
        return cls(fingerprint, layers, kv_heads, head_dim, chunk_tokens, dtype, piece_bytes, windows)

    @property
    def is_of_heads(self) -> bool:
        """Whether a piece has the size of K and V of every head."""
        return self.piece_bytes == self.kv_heads * 2 * self.chunk_tokens * self.head_dim * DTYPE_BYTES.get(
            self.dtype, 0
        )

    @property
    def chunk_bytes(self) -> int:
        """Bytes of all layers of one chunk."""
        return self.piece_bytes * self.layers

    @property
    def token_bytes(self) -> int:
        """Bytes that one token adds over all layers."""
        return self.chunk_bytes // self.chunk_tokens

    def read_after(self, chunks: int) -> list[tuple[int, ...]]:
        """Of each of the first `chunks` chunks, the layers that a request reads which continues them; () for all.
        Where it reads nothing of a chunk, layer 0 stands for it."""
        skipped = passed(chunks * self.chunk_tokens, longest_window(self.windows), self.chunk_tokens)
        few = tuple(layer for layer, window in enumerate(self.windows) if not window) or (0,)
        return [few] * skipped + [()] * (chunks - skipped)


@dataclass(slots=True)
class Manifest:
    """A session's chunks, in order. `last_use_s` is wall-clock seconds since the epoch.

    former: chunks of earlier turns that the current history no longer contains, oldest first. They stay cached until
    swept, and erasing the session erases them too. Set by stores only.

    life: number of the session's life; an erasure ends a life (kvstore/core/graves.py). Set by stores only.

    note: what the session's worker wants back when the session is offered to one, at most MAX_NOTE_BYTES. Stores do not
    read it.
    """

    session: SessionKey
    model: str
    fingerprint: bytes
    keys: list[bytes] = field(default_factory=list)
    tokens: int = 0
    last_use_s: float = 0.0
    former: list[bytes] = field(default_factory=list)
    life: int = 0
    note: bytes = b""


def check_shape(shape: KvShape) -> KvShape:
    """Returns `shape` if a store can hold it. Raises InvalidRequest naming the field otherwise."""
    least = {"kv_heads": 1, "head_dim": 1, "chunk_tokens": 1, "layers": 1, "piece_bytes": shape.chunk_tokens}
    most = {"layers": MAX_LAYERS, "piece_bytes": MAX_PIECE_BYTES}
    if len(shape.fingerprint) != KEY_BYTES:
        raise InvalidRequest(
            f"fingerprint has {len(shape.fingerprint)} bytes; it needs {KEY_BYTES}", param="fingerprint"
        )
    if not _DTYPE.fullmatch(shape.dtype):
        raise InvalidRequest(f"dtype = {shape.dtype[:60]!r}: must match {_DTYPE.pattern}", param="dtype")
    for name, minimum in least.items():
        value: int = getattr(shape, name)
        if value < minimum:
            raise InvalidRequest(f"{name} = {value}: must be at least {minimum}", param=name)
        if value > most.get(name, value):
            raise InvalidRequest(f"{name} = {value}: must be at most {most[name]}", param=name)
    if shape.windows and len(shape.windows) != shape.layers:
        raise InvalidRequest(f"windows are of {len(shape.windows)} layers: must be of {shape.layers}", param="windows")
    return shape


def fingerprint(
    weights_digest: bytes, *, dtype: str, chunk_tokens: int, adapter: bytes = b"", layout: bytes = b""
) -> bytes:
    """The model fingerprint, 32 bytes. Never depends on a path or a time.

    layout: name of an engine's byte order within a piece, if other than LAYOUT_VERSION's. Engines with different
    layouts share no KV.
    """
    h = blake3(b"upbeat model fingerprint")
    parts = [weights_digest, adapter, dtype.encode(), struct.pack("<II", LAYOUT_VERSION, chunk_tokens)]
    for part in [*parts, layout] if layout else parts:
        h.update(struct.pack("<I", len(part)))
        h.update(part)
    return h.digest()


def tenant_salt(secret: bytes, tenant: str) -> bytes:
    """The 32-byte key of a tenant's chunk keys, derived from the cluster secret."""
    return blake3(secret + tenant.encode(), derive_key_context="upbeat 2026 tenant salt of chunk keys").digest()


def chunk_key(salt: bytes, model_fingerprint: bytes, parent: bytes, tokens: Sequence[int], extra: bytes = b"") -> bytes:
    """The key of the chunk that holds exactly `tokens` after the prefix named by `parent`.

    extra: further inputs of its KV: a LoRA adapter, or hashes of images and their places in the chunk.
    """
    body = model_fingerprint + parent + struct.pack(f"<{len(tokens)}I", *tokens)
    if extra:
        # Unambiguous: a body without an extra is whole 32-bit words; with one it has an odd byte, and the extra's
        # length.
        body += extra + bytes(-len(extra) % 4) + struct.pack("<IB", len(extra), 1)
    return blake3(body, key=salt).digest()


def chunk_keys(
    salt: bytes,
    shape: KvShape,
    tokens: Sequence[int],
    known: Sequence[bytes] = (),
    extras: Mapping[int, bytes] | None = None,
) -> list[bytes]:
    """Keys of the full chunks of `tokens`, in order. known: the first keys, if already computed.

    extras: `extra` of `chunk_key` by the chunk's number. Keys depend on the previous ones, so an extra of the first
    chunk applies to all.
    """
    keys, extras = list(known), extras or {}
    parent = keys[-1] if keys else _ROOT
    size = shape.chunk_tokens
    for start in range(len(keys) * size, len(tokens) - size + 1, size):
        parent = chunk_key(salt, shape.fingerprint, parent, tokens[start : start + size], extras.get(len(keys), b""))
        keys.append(parent)
    return keys


def request_extras(cache_salt: str, adapter: bytes = b"") -> dict[int, bytes] | None:
    """`extras` of `chunk_keys` for a request. cache_salt: its scope, which separates KV within a tenant; empty: none.
    adapter: the digest of its LoRA adapter, KEY_BYTES; empty: none. Raises ValueError for a digest of another length.
    """
    if adapter and len(adapter) != KEY_BYTES:
        raise ValueError(f"an adapter's digest has {KEY_BYTES} bytes, not {len(adapter)}")
    # Unambiguous: the digest's length is fixed, and the two beginnings differ.
    extra = b"adapter" + adapter if adapter else b""
    if cache_salt:
        extra += b"cache_salt" + cache_salt.encode("utf-8", "surrogatepass")
    return {0: extra} if extra else None


def leading(flags: Iterable[bool]) -> int:
    """How many of the first flags are true without a gap: the usable length of a prefix."""
    count = 0
    for flag in flags:
        if not flag:
            break
        count += 1
    return count
