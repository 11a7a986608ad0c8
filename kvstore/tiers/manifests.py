"""A session's manifest, and an erased session's tombstone, as objects of the blob tier: where they lie and what their bytes are.

`manifests/<tenant>/<session>` and `erased/<tenant>/<session>`: magic, xxh3-64 of the rest, msgpack. Names are escaped so
that no session or tenant, however it was checked before, can name a place outside its folder; the true names are inside the
object.
"""

from __future__ import annotations

import re
from typing import Any

import msgpack
import xxhash
from blake3 import blake3

from contracts.errors import PieceLost
from contracts.ids import SessionKey
from contracts.kv import KEY_BYTES, Manifest
from kvstore.core.events import Tombstone

_MAGIC = b"UPBEATMF\x01"
_TOMBSTONE_MAGIC = b"UPBEATTS\x01"
_MAX_NAME = 180
_UNSAFE = re.compile(r"[^A-Za-z0-9_:.-]|^\.")
PREFIX = "manifests"
ERASED_PREFIX = "erased"


def _escape(name: str) -> str:
    safe = _UNSAFE.sub(lambda m: "".join(f"={b:02X}" for b in m.group().encode("utf-8", "surrogatepass")), name)
    if not safe or len(safe) > _MAX_NAME:
        return "=" + blake3(name.encode("utf-8", "surrogatepass")).hexdigest()
    return safe


def manifest_path(session: SessionKey) -> str:
    """The object's name. Never contains `..` as a part, an empty part, or anything that a file system gives a meaning."""
    return f"{PREFIX}/{_escape(session.tenant)}/{_escape(session.session_id)}"


def tombstone_path(session: SessionKey) -> str:
    """As `manifest_path`."""
    return f"{ERASED_PREFIX}/{_escape(session.tenant)}/{_escape(session.session_id)}"


def encode_manifest(manifest: Manifest) -> bytes:
    """The object's bytes."""
    body: bytes = msgpack.packb(
        [
            manifest.session.tenant,
            manifest.session.session_id,
            manifest.model,
            manifest.fingerprint,
            b"".join(manifest.keys),
            manifest.tokens,
            manifest.last_use_s,
            b"".join(manifest.former),
        ]
    )
    return _sealed(_MAGIC, body)


def _sealed(magic: bytes, body: bytes) -> bytes:
    return magic + xxhash.xxh3_64_digest(body) + body


def _opened(magic: bytes, data: bytes) -> Any:
    """What was packed. Raises PieceLost when anything is odd."""
    start = len(magic) + 8
    if data[: len(magic)] != magic or xxhash.xxh3_64_digest(data[start:]) != data[len(magic) : start]:
        raise PieceLost("not what its name says")
    try:
        return msgpack.unpackb(data[start:])
    except (ValueError, msgpack.UnpackException) as e:
        raise PieceLost("not what its name says") from e


def _cut(keys: object) -> list[bytes]:
    if not isinstance(keys, bytes) or len(keys) % KEY_BYTES:
        raise PieceLost("no list of chunk keys")
    return [keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES)]


def encode_tombstone(tombstone: Tombstone) -> bytes:
    """The object's bytes."""
    session = tombstone.session
    body = [session.tenant, session.session_id, tombstone.fingerprint, b"".join(tombstone.keys), tombstone.erased_s]
    return _sealed(_TOMBSTONE_MAGIC, msgpack.packb(body))


def decode_tombstone(data: bytes) -> Tombstone:
    """The tombstone. Raises PieceLost when anything is odd."""
    try:
        tenant, session_id, fingerprint, keys, erased_s = _opened(_TOMBSTONE_MAGIC, data)
    except (ValueError, TypeError) as e:
        raise PieceLost("not a tombstone") from e
    return Tombstone(SessionKey(tenant, session_id), fingerprint, tuple(_cut(keys)), float(erased_s))


def decode_manifest(data: bytes) -> Manifest:
    """The manifest. Raises PieceLost when anything is odd."""
    try:
        tenant, session_id, model, fingerprint, keys, tokens, last_use_s, *former = _opened(_MAGIC, data)
    except (ValueError, TypeError) as e:
        raise PieceLost("not a manifest") from e
    # Those written before manifests told of former chunks have no such field.
    return Manifest(SessionKey(tenant, session_id), model, fingerprint, _cut(keys), tokens, last_use_s, _cut(former[0] if former else b""))
