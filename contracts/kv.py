"""The KV cache's vocabulary: shapes, fingerprints, chunk keys, tiers, manifests.

Prior art: vLLM and LMCache hash token blocks into chains too. Ours are keyed per tenant with a secret, so that equal
prompts of two tenants share nothing, and depend on content only, so that they hold on every machine and after every
restart.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from blake3 import blake3

from contracts.ids import SessionKey

#: Version of the piece layout `[kv_heads, 2, chunk_tokens, head_dim]`; part of every fingerprint.
LAYOUT_VERSION = 1
KEY_BYTES = 32
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

_ROOT = bytes(KEY_BYTES)


class Tier(IntEnum):
    """Where a piece can be, fastest first."""

    HBM = 0
    DRAM = 1
    SSD = 2
    BLOB = 3


@dataclass(frozen=True, slots=True)
class KvShape:
    """The KV geometry of one model on one device.

    fingerprint: 32 bytes over weights digest, adapter, dtype, layout version and `chunk_tokens`.
    """

    fingerprint: bytes
    layers: int
    kv_heads: int
    head_dim: int
    chunk_tokens: int
    dtype: str

    @property
    def piece_bytes(self) -> int:
        """Bytes of one layer of one chunk: K and V of `chunk_tokens` tokens."""
        return self.kv_heads * 2 * self.chunk_tokens * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def chunk_bytes(self) -> int:
        """Bytes of all layers of one chunk."""
        return self.piece_bytes * self.layers

    @property
    def token_bytes(self) -> int:
        """Bytes that one token adds over all layers."""
        return self.chunk_bytes // self.chunk_tokens


@dataclass(slots=True)
class Manifest:
    """A session's chunks, in order. `last_use_s` is wall-clock seconds since the epoch.

    former: chunks that earlier turns named and this one does not, as its history was cut or reads otherwise now; oldest first. Only
    stores know them: they are cache until they are swept, and the session's erasure is theirs too.

    life: which of the session's lives it is of, as erasures end them (kvstore/core/graves.py). Only stores know it.
    """

    session: SessionKey
    model: str
    fingerprint: bytes
    keys: list[bytes] = field(default_factory=list)
    tokens: int = 0
    last_use_s: float = 0.0
    former: list[bytes] = field(default_factory=list)
    life: int = 0


def fingerprint(weights_digest: bytes, *, dtype: str, chunk_tokens: int, adapter: bytes = b"") -> bytes:
    """The model fingerprint, 32 bytes. Never depends on a path or a time."""
    h = blake3(b"upbeat model fingerprint")
    for part in (weights_digest, adapter, dtype.encode(), struct.pack("<II", LAYOUT_VERSION, chunk_tokens)):
        h.update(struct.pack("<I", len(part)))
        h.update(part)
    return h.digest()


def tenant_salt(secret: bytes, tenant: str) -> bytes:
    """The 32-byte key of a tenant's chunk keys, derived from the cluster secret."""
    return blake3(secret + tenant.encode(), derive_key_context="upbeat 2026 tenant salt of chunk keys").digest()


def chunk_key(salt: bytes, model_fingerprint: bytes, parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of the chunk that holds exactly `tokens` after the prefix named by `parent`."""
    body = model_fingerprint + parent + struct.pack(f"<{len(tokens)}I", *tokens)
    return blake3(body, key=salt).digest()


def chunk_keys(salt: bytes, shape: KvShape, tokens: Sequence[int], known: Sequence[bytes] = ()) -> list[bytes]:
    """Keys of the full chunks of `tokens`, in order; `known` are the first ones when already computed."""
    keys = list(known)
    parent = keys[-1] if keys else _ROOT
    size = shape.chunk_tokens
    for start in range(len(keys) * size, len(tokens) - size + 1, size):
        parent = chunk_key(salt, shape.fingerprint, parent, tokens[start : start + size])
        keys.append(parent)
    return keys


def leading(flags: Iterable[bool]) -> int:
    """How many of the first flags are true without a gap: the usable length of a prefix."""
    count = 0
    for flag in flags:
        if not flag:
            break
        count += 1
    return count
