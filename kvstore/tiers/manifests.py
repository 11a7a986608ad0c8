"""The names and bytes of manifests, tombstones and confirmations as objects of the blob tier.

`manifests/<tenant>/<session>`, `tombstones/<tenant>/<session>/<its digest>` and `confirmed/<node>`: magic,
authenticator, msgpack. The authenticator is a keyed hash of the object's name (of a tombstone: its folder), magic and
content, so that nothing else in the bucket is believed (cluster_keys.py). Names are escaped so that no session or
tenant can name a path outside its folder; the true names are inside the object.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable
from typing import Any

import msgpack
from blake3 import blake3

from contracts.errors import PieceLost
from contracts.ids import SessionKey
from contracts.kv import KEY_BYTES, Manifest
from kvstore.core.tombstone import Tombstone
from kvstore.tiers.cluster_keys import MAC_BYTES, ClusterKeys

_MAGIC = b"UPBEATMF\x02"
_TOMBSTONE_MAGIC = b"UPBEATTS\x03"
_CONFIRMED_MAGIC = b"UPBEATCF\x02"
_GONE_MAGIC = b"UPBEATGN\x01"
_MAX_NAME = 180
_UNSAFE = re.compile(r"[^A-Za-z0-9_:.-]|^\.")
PREFIX = "manifests"
ERASED_PREFIX = "tombstones"
CONFIRMED_PREFIX = "confirmed"
GONE_PREFIX = "gone"


def _escape(name: str) -> str:
    safe = _UNSAFE.sub(lambda m: "".join(f"={b:02X}" for b in m.group().encode("utf-8", "surrogatepass")), name)
    if not safe or len(safe) > _MAX_NAME:
        return "=" + blake3(name.encode("utf-8", "surrogatepass")).hexdigest()
    return safe


def manifest_path(session: SessionKey) -> str:
    """The object's name. It contains no `..`, no empty part, and no character special to a file system."""
    return f"{PREFIX}/{_escape(session.tenant)}/{_escape(session.session_id)}"


def tombstone_folder(session: SessionKey) -> str:
    """The prefix of the session's tombstones."""
    return f"{ERASED_PREFIX}/{_escape(session.tenant)}/{_escape(session.session_id)}"


def tombstone_path(session: SessionKey, data: bytes) -> str:
    """Named by content: nodes that know the same write the same object, and none overwrites another's."""
    return f"{tombstone_folder(session)}/{blake3(data).hexdigest()[:32]}"


def object_name(node: str) -> str:
    """The node's name as the last part of a path."""
    return _escape(node)


def confirmed_path(node: str) -> str:
    """The name of the node's list of confirmed tombstones."""
    return f"{CONFIRMED_PREFIX}/{object_name(node)}"


def gone_path(node: str) -> str:
    """The name of the object that says that the node has left for good."""
    return f"{GONE_PREFIX}/{object_name(node)}"


def encode_manifest(keys: ClusterKeys, manifest: Manifest) -> bytes:
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
            manifest.life,
            manifest.note,
        ]
    )
    return _signed(keys, manifest_path(manifest.session), _MAGIC, body)


def _signed(keys: ClusterKeys, name: str, magic: bytes, body: bytes) -> bytes:
    return magic + keys.of_record(name, magic + body) + body


def _opened(keys: ClusterKeys, name: str, magic: bytes, data: bytes) -> Any:
    """The unpacked content of the record of this name. Raises PieceLost when invalid."""
    start = len(magic) + MAC_BYTES
    signed = keys.of_record(name, magic + data[start:])
    if data[: len(magic)] != magic or not hmac.compare_digest(signed, data[len(magic) : start]):
        raise PieceLost("not what its name says")
    try:
        return msgpack.unpackb(data[start:])
    except (ValueError, msgpack.UnpackException) as e:
        raise PieceLost("not what its name says") from e


def _cut(keys: object) -> list[bytes]:
    if not isinstance(keys, bytes) or len(keys) % KEY_BYTES:
        raise PieceLost("no list of chunk keys")
    return [keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES)]


def encode_tombstone(keys: ClusterKeys, tombstone: Tombstone) -> bytes:
    """The object's bytes; equal erasures give equal bytes."""
    models: dict[bytes, list[bytes]] = {}
    for key, fingerprint in sorted(tombstone.chunks.items()):
        models.setdefault(fingerprint, []).append(key)
    session = tombstone.session
    body = [
        session.tenant,
        session.session_id,
        tombstone.number,
        [[f, b"".join(chunks)] for f, chunks in sorted(models.items())],
    ]
    return _signed(keys, tombstone_folder(session), _TOMBSTONE_MAGIC, msgpack.packb(body))


def decode_tombstone(keys: ClusterKeys, path: str, data: bytes) -> Tombstone:
    """The tombstone in the object of this name. Raises PieceLost when invalid."""
    try:
        tenant, session_id, number, models = _opened(keys, path.rpartition("/")[0], _TOMBSTONE_MAGIC, data)
        chunks = {key: bytes(fingerprint) for fingerprint, joined in models for key in _cut(joined)}
        tombstone = Tombstone(SessionKey(tenant, session_id), int(number), chunks)
    except (ValueError, TypeError) as e:
        raise PieceLost("not a tombstone") from e
    if tombstone_path(tombstone.session, data) != path:
        raise PieceLost("another session's tombstone")
    return tombstone


def encode_confirmed(keys: ClusterKeys, node: str, names: Iterable[str]) -> bytes:
    """The object's bytes. names: the last parts of tombstones' paths."""
    return _signed(keys, confirmed_path(node), _CONFIRMED_MAGIC, msgpack.packb(sorted(names)))


def decode_confirmed(keys: ClusterKeys, path: str, data: bytes) -> frozenset[str]:
    """The names in the object of this name. Raises PieceLost when invalid."""
    names = _opened(keys, path, _CONFIRMED_MAGIC, data)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise PieceLost("no list of names")
    return frozenset(names)


def encode_gone(keys: ClusterKeys, node: str) -> bytes:
    """The bytes of the object at `gone_path`."""
    return _signed(keys, gone_path(node), _GONE_MAGIC, msgpack.packb(node))


def decode_gone(keys: ClusterKeys, path: str, data: bytes) -> str:
    """The node that has left, by the object of this name. Raises PieceLost when invalid."""
    node = _opened(keys, path, _GONE_MAGIC, data)
    if not isinstance(node, str) or gone_path(node) != path:
        raise PieceLost("no name of a node")
    return node


def decode_manifest(keys: ClusterKeys, path: str, data: bytes) -> Manifest:
    """The manifest in the object of this name. Raises PieceLost when invalid."""
    try:
        tenant, session_id, model, fingerprint, joined, tokens, last_use_s, former, life, note = _opened(
            keys, path, _MAGIC, data
        )
        manifest = Manifest(
            SessionKey(tenant, session_id),
            model,
            fingerprint,
            _cut(joined),
            tokens,
            last_use_s,
            _cut(former),
            int(life),
            bytes(note),
        )
    except (ValueError, TypeError) as e:
        raise PieceLost("not a manifest") from e
    if manifest_path(manifest.session) != path:
        raise PieceLost("another session's manifest")
    return manifest
