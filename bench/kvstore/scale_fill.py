"""A deployment's directory with very many chunks and sessions, in the store's own formats, written without a store."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from blake3 import blake3

from contracts.ids import SessionKey
from contracts.kv import KvShape, Manifest
from kvstore.tiers.blob import chunk_path
from kvstore.tiers.cluster_keys import ClusterKeys
from kvstore.tiers.format import Header, encode_header, header_bytes, object_bytes, raw_layout
from kvstore.tiers.manifests import encode_manifest, manifest_path
from kvstore.tiers.objects import ROOT
from runtime.config_file import cluster_secret

#: Files of 12 KiB: two layers of 4 KiB pieces.
SMALL = KvShape.of_heads(b"small".ljust(32, b"."), 2, 1, 16, 32, "float32")
SESSION_CHUNKS = 16
TENANTS = 8
#: One chunk more, of nobody's, for each so many.
ORPHAN_EVERY = 1000
#: One session of so many was last used long ago; the others will be used last in a day, so that they do not expire.
IDLE_EVERY, _DAY_S = 100, 86_400.0


def chunk_key(number: int) -> bytes:
    """Of the number-th chunk. Chunks from `chunks` on are in no tier, and their sessions elsewhere."""
    return blake3(b"chunk %d" % number).digest()


def session_of(number: int) -> SessionKey:
    """The number-th session: it has chunks from SESSION_CHUNKS * number on."""
    return SessionKey(f"tenant-{number % TENANTS}", f"session-{number:09d}")


def manifest_of(number: int, now_s: float) -> Manifest:
    """Its manifest. now_s: the wall-clock time."""
    last_use_s = now_s + (_DAY_S if number % IDLE_EVERY else -_DAY_S)
    keys = [chunk_key(number * SESSION_CHUNKS + n) for n in range(SESSION_CHUNKS)]
    return Manifest(session_of(number), "m", SMALL.fingerprint, keys, SESSION_CHUNKS * SMALL.chunk_tokens, last_use_s)


def orphans(chunks: int) -> Iterator[bytes]:
    """Keys of the chunks that no session names."""
    return (blake3(b"orphan %d" % number).digest() for number in range(chunks // ORPHAN_EVERY))


def fill(data: Path, chunks: int, sessions: int, now_s: float) -> None:
    """In the deployment's directory, write `chunks` chunks and the orphans to the SSD and, as links, to blob; manifests
    of all `sessions` to blob."""
    keys, ssd, blob = ClusterKeys(cluster_secret(data)), data / "node-0" / "ssd", data / "blob" / ROOT
    folder = ssd / SMALL.fingerprint.hex()[:16]
    links = (blob / chunk_path(bytes(32), SMALL.fingerprint)).parent
    for made in (folder, links):
        made.mkdir(parents=True)
    body = os.urandom(object_bytes(SMALL) - header_bytes(SMALL.layers))
    for number in range(chunks):
        _chunk(keys, folder, links, chunk_key(number), number, body)
    for key in orphans(chunks):
        _chunk(keys, folder, links, key, 0, body)
    for tenant in range(TENANTS):
        (blob / manifest_path(session_of(tenant))).parent.mkdir(parents=True)
    for number in range(sessions):
        manifest = manifest_of(number, now_s)
        _write(f"{blob}/{manifest_path(manifest.session)}", encode_manifest(keys, manifest))


def _chunk(keys: ClusterKeys, folder: Path, links: Path, key: bytes, number: int, body: bytes) -> None:
    name = key.hex()
    _write(f"{folder}/{name}", encode_header(keys, Header(key, SMALL, raw_layout(SMALL), (number, number + 1))) + body)
    os.link(f"{folder}/{name}", f"{links}/{name}")


def _write(path: str, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    os.write(fd, data)
    os.close(fd)
