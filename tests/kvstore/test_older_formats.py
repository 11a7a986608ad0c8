"""Stores of two format versions on one bucket: neither sees the other's objects, and what the older ones left goes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgpack
import obstore
import pytest
import xxhash
from obstore.store import LocalStore

from contracts.ids import SessionKey
from contracts.kv import Manifest
from kvstore.core.events import Fault
from kvstore.tiers.blob import BlobTier, chunk_path
from kvstore.tiers.file_io import ThreadFileIo
from kvstore.tiers.manifests import manifest_path
from kvstore.tiers.objects import Objects, open_store
from kvstore.tiers.older_formats import KEPT_S, OlderFormats
from kvstore.tiers.ssd import SsdTier
from tests.kvstore.tier_harness import KEY, KEYS, OTHER_KEY, SHAPE, arena, object_of, written

__all__ = ["arena"]

SESSION = SessionKey("t", "s")


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    return tmp_path / "bucket"


def old_manifest(session: SessionKey, keys: list[bytes]) -> bytes:
    """As stores of version 2 wrote it."""
    former = b""
    body = msgpack.packb([*session, "model", SHAPE.fingerprint, b"".join(keys), 32, 12.5, former, 0, b""])
    return b"UPBEATMF\x01" + xxhash.xxh3_64_digest(body) + body


def old_chunk() -> bytes:
    return b"UPBEATKV" + (2).to_bytes(4, "little") + bytes(8180)


async def put_old(store: LocalStore, session: SessionKey, keys: list[bytes]) -> None:
    """A session of version 2."""
    await obstore.put_async(store, manifest_path(session), old_manifest(session, keys))
    for key in keys:
        await obstore.put_async(store, chunk_path(key, SHAPE.fingerprint), old_chunk())


def paths(root: Path) -> set[str]:
    return {p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()}


async def test_a_store_neither_reads_nor_deletes_what_a_store_of_another_version_has(bucket, arena):
    top = LocalStore(bucket, mkdir=True)
    await put_old(top, SESSION, [KEY])
    before = paths(bucket)
    blob = BlobTier(open_store("", {}, bucket), arena, KEYS)
    assert await blob.locate(KEY, SHAPE.fingerprint) is Fault.MISSING
    assert await blob.find_manifest(SESSION) is Fault.MISSING
    assert [page async for page in blob.manifests()] == []
    assert [page async for page in blob.old_chunks(time.time() + 1)] == []
    await blob.write(KEY, SHAPE.fingerprint, object_of(arena, written(arena)))
    await blob.put_manifest(Manifest(SESSION, "m", SHAPE.fingerprint, [KEY], 64, 1.0))
    await blob.delete_chunk(KEY, SHAPE.fingerprint)
    assert before <= paths(bucket)
    assert paths(bucket) - before == {f"v3/{manifest_path(SESSION)}"}


async def test_an_erasure_takes_the_older_versions_objects_of_the_session_and_no_others(bucket):
    top = LocalStore(bucket, mkdir=True)
    await put_old(top, SESSION, [KEY])
    await put_old(top, SessionKey("t", "other"), [OTHER_KEY])
    await obstore.put_async(top, chunk_path(b"n" * 32, SHAPE.fingerprint), old_chunk())
    older = OlderFormats(Objects(open_store("", {}, bucket, root="")))
    assert await older.erase(SESSION, {b"n" * 32: SHAPE.fingerprint})
    assert await older.erase(SESSION, {}), "nothing is left of it"
    assert paths(bucket) == {
        manifest_path(SessionKey("t", "other")),
        chunk_path(OTHER_KEY, SHAPE.fingerprint),
    }
    await obstore.put_async(top, manifest_path(SESSION), b"nonsense")
    assert await older.erase(SESSION, {}) and manifest_path(SESSION) not in paths(bucket)


async def test_what_nobody_wrote_for_a_week_goes_and_nothing_of_this_version(bucket, arena):
    top = LocalStore(bucket, mkdir=True)
    await put_old(top, SESSION, [KEY, OTHER_KEY])
    blob = BlobTier(open_store("", {}, bucket), arena, KEYS)
    await blob.write(KEY, SHAPE.fingerprint, object_of(arena, written(arena)))
    long_ago = time.time() - KEPT_S - 10
    for path in (chunk_path(KEY, SHAPE.fingerprint), f"v3/{chunk_path(KEY, SHAPE.fingerprint)}"):
        os.utime(bucket / path, (long_ago, long_ago))
    older = OlderFormats(Objects(open_store("", {}, bucket, root="")))
    for theirs in ("chunks/0a/backup-of-somebody", "manifests/database.dump"):
        await obstore.put_async(top, theirs, b"not ours")
        os.utime(bucket / theirs, (long_ago, long_ago))
    assert [await older.sweep(time.time()) for _ in range(3)] == [0, 1, 0]
    assert paths(bucket) == {
        "chunks/0a/backup-of-somebody",
        "manifests/database.dump",
        manifest_path(SESSION),
        chunk_path(OTHER_KEY, SHAPE.fingerprint),
        f"v3/{chunk_path(KEY, SHAPE.fingerprint)}",
    }


def test_files_of_another_version_on_the_own_ssd_are_deleted_at_the_start(tmp_path, arena):
    io = ThreadFileIo(arena)
    ssd = SsdTier(tmp_path / "ssd", arena, KEYS, io, io)
    path = ssd.path(KEY, SHAPE.fingerprint)
    path.parent.mkdir(parents=True)
    path.write_bytes(old_chunk())
    recovery = ssd.recover()
    ssd.close()
    assert (recovery.copies, recovery.deleted) == ([], 1) and not path.exists()
