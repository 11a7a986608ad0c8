"""A session's manifest as an object of the blob tier: where it lies and what its bytes are.

`manifests/<tenant>/<session>`: magic, xxh3-64 of the rest, msgpack. Names are escaped so that no session or tenant, however
it was checked before, can name a place outside its folder; the true names are inside the object.
"""

from __future__ import annotations

import re

import msgpack
import xxhash
from blake3 import blake3

from contracts.errors import PieceLost
from contracts.ids import SessionKey
from contracts.kv import KEY_BYTES, Manifest

_MAGIC = b"UPBEATMF\x01"
_MAX_NAME = 180
_UNSAFE = re.compile(r"[^A-Za-z0-9_:.-]|^\.")
PREFIX = "manifests"


def _escape(name: str) -> str:
    safe = _UNSAFE.sub(lambda m: "".join(f"={b:02X}" for b in m.group().encode("utf-8", "surrogatepass")), name)
    if not safe or len(safe) > _MAX_NAME:
        return "=" + blake3(name.encode("utf-8", "surrogatepass")).hexdigest()
    return safe


def manifest_path(session: SessionKey) -> str:
    """The object's name. Never contains `..` as a part, an empty part, or anything that a file system gives a meaning."""
    return f"{PREFIX}/{_escape(session.tenant)}/{_escape(session.session_id)}"


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
        ]
    )
    return _MAGIC + xxhash.xxh3_64_digest(body) + body


def decode_manifest(data: bytes) -> Manifest:
    """The manifest. Raises PieceLost when anything is odd."""
    start = len(_MAGIC) + 8
    if data[: len(_MAGIC)] != _MAGIC or xxhash.xxh3_64_digest(data[start:]) != data[len(_MAGIC) : start]:
        raise PieceLost("not a manifest")
    try:
        tenant, session_id, model, fingerprint, keys, tokens, last_use_s = msgpack.unpackb(data[start:])
    except (ValueError, TypeError, msgpack.UnpackException) as e:
        raise PieceLost("not a manifest") from e
    if not isinstance(keys, bytes) or len(keys) % KEY_BYTES:
        raise PieceLost("not a manifest")
    cut = [keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES)]
    return Manifest(SessionKey(tenant, session_id), model, fingerprint, cut, tokens, last_use_s)
