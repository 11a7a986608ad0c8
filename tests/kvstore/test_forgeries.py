"""What whoever can write to the bucket or disk may put there: nothing is believed that this cluster did not write in
that place."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest
import xxhash
from blake3 import blake3
from obstore.store import MemoryStore

from contracts.errors import PieceLost
from contracts.ids import SessionKey
from kvstore.core.events import Fault
from kvstore.core.tombstone import Tombstone
from kvstore.tiers.blob import BlobTier
from kvstore.tiers.cluster_keys import ClusterKeys
from kvstore.tiers.encoded import StoredChunk
from kvstore.tiers.file_io import ThreadFileIo
from kvstore.tiers.format import encode_header
from kvstore.tiers.key_names import KeyName
from kvstore.tiers.manifests import (
    confirmed_path,
    decode_confirmed,
    decode_manifest,
    decode_tombstone,
    encode_confirmed,
    encode_manifest,
    encode_tombstone,
    manifest_path,
    tombstone_path,
)
from kvstore.tiers.sealing import SessionSecret
from kvstore.tiers.session_keys import decode_key, encode_key
from kvstore.tiers.ssd import SsdTier
from tests.kvstore import forgeries
from tests.kvstore.forgeries import SECRET, SESSION, SMALL, chunk, flip_bits, read_chunk
from tests.kvstore.tier_harness import KEY, KEYS, OTHER_KEY, SHAPE, arena, object_of, written

__all__ = ["arena"]

SEED = int(os.environ.get("UPBEAT_FAULTS_SEED", random.SystemRandom().randrange(1 << 30)))
OTHER_CLUSTER = ClusterKeys(b"another cluster's secret")
SECRETS = pytest.mark.parametrize("secret", [None, SECRET], ids=["plain", "encrypted"])


def test_ten_thousand_flipped_bits_are_noticed_wherever_they_are():
    noticed = flip_bits(10_000, SEED)
    assert set(noticed) == {s.name for s in forgeries.subjects()}
    for name in ("manifest", "tombstone", "confirmation", "session key"):
        assert noticed[name] >= 10_000 // 6


@SECRETS
def test_a_header_of_another_cluster_is_refused_although_its_digests_are_right(secret):
    good = chunk(secret)
    forged = StoredChunk(good.header, encode_header(OTHER_CLUSTER, good.header), good.pieces)
    assert read_chunk(good.to_bytes())
    with pytest.raises(PieceLost, match="authenticator"):
        read_chunk(forged.to_bytes())


def test_right_unkeyed_checksums_do_not_help_a_forger():
    evil = [bytes(SMALL.piece_bytes)] * SMALL.layers
    for digest in (xxhash.xxh3_64_intdigest, lambda p: int.from_bytes(blake3(p).digest(length=8), "little")):
        good = chunk(None)
        header = replace(good.header, checksums=tuple(map(digest, evil)))
        # Even with a header that the cluster itself wrote, the pieces' digests are keyed.
        with pytest.raises(PieceLost, match="digest"):
            read_chunk(StoredChunk(header, encode_header(KEYS, header), evil).to_bytes())


@SECRETS
def test_pieces_are_refused_in_another_layer_or_chunk(secret):
    first, second = chunk(secret), chunk(secret, OTHER_KEY, seed=2)
    turned = StoredChunk(first.header, first.head, list(reversed(first.pieces)))
    with pytest.raises(PieceLost):
        read_chunk(turned.to_bytes())
    # Even the digests are of no use in another layer.
    header = replace(first.header, checksums=tuple(reversed(first.header.checksums)))
    with pytest.raises(PieceLost):
        read_chunk(StoredChunk(header, encode_header(KEYS, header), list(reversed(first.pieces))).to_bytes())
    mixed = StoredChunk(first.header, first.head, second.pieces)
    with pytest.raises(PieceLost):
        read_chunk(mixed.to_bytes())
    header = replace(first.header, checksums=second.header.checksums)
    with pytest.raises(PieceLost):
        read_chunk(StoredChunk(header, encode_header(KEYS, header), second.pieces).to_bytes())
    with pytest.raises(PieceLost):
        read_chunk(second.to_bytes(), KEY)


def test_an_encrypted_piece_is_refused_under_another_sessions_key():
    other = SessionSecret(SECRET.name, b"T" * 32)
    with pytest.raises(PieceLost, match="encrypted"):
        read_chunk(chunk(SECRET).to_bytes(), secret=other)


def test_equal_chunks_are_encrypted_differently_every_time():
    first, second = chunk(SECRET), chunk(SECRET)
    assert read_chunk(first.to_bytes()) == read_chunk(second.to_bytes())
    assert all(bytes(a) != bytes(b) for a, b in zip(first.pieces, second.pieces, strict=True))


def test_a_record_is_believed_under_its_own_name_and_of_this_cluster_only():
    manifest = forgeries.Manifest(SESSION, "m", SMALL.fingerprint, [KEY], 64, 1.0)
    other = SessionKey("tenant", "other")
    tombstone, names = Tombstone(SESSION, 4, {KEY: SMALL.fingerprint}), ["a" * 32]
    data = encode_manifest(KEYS, manifest)
    grave = encode_tombstone(KEYS, tombstone)
    for path in (manifest_path(other), manifest_path(SessionKey("other", "session"))):
        with pytest.raises(PieceLost):
            decode_manifest(KEYS, path, data)
    with pytest.raises(PieceLost):
        decode_manifest(KEYS, manifest_path(SESSION), encode_manifest(OTHER_CLUSTER, manifest))
    with pytest.raises(PieceLost):
        decode_tombstone(KEYS, tombstone_path(other, grave), grave)
    forged = encode_tombstone(OTHER_CLUSTER, tombstone)
    with pytest.raises(PieceLost):
        decode_tombstone(KEYS, tombstone_path(SESSION, forged), forged)
    with pytest.raises(PieceLost):
        decode_confirmed(KEYS, confirmed_path("node-1"), encode_confirmed(KEYS, "node-0", names))
    with pytest.raises(PieceLost):
        decode_confirmed(KEYS, confirmed_path("node-0"), encode_confirmed(OTHER_CLUSTER, "node-0", names))


def test_a_session_key_opens_under_its_own_name_tenant_and_cluster_only():
    data = encode_key(KEYS, "tenant", SECRET)
    assert decode_key(KEYS, SECRET.name, data) == SECRET
    for name in (
        SECRET.name._replace(life=9),
        SECRET.name._replace(number=b"another."),
        KeyName(bytes(16), 3, bytes(8)),
    ):
        with pytest.raises(PieceLost):
            decode_key(KEYS, name, data)
    with pytest.raises(PieceLost):
        decode_key(OTHER_CLUSTER, SECRET.name, data)
    with pytest.raises(PieceLost):
        decode_key(KEYS, SECRET.name, data.replace(b"tenant", b"tenanu"))


async def test_forged_records_in_the_bucket_are_not_there_for_a_store(arena):
    store = MemoryStore()
    ours, theirs = BlobTier(store, arena, KEYS), BlobTier(store, arena, OTHER_CLUSTER)
    manifest = forgeries.Manifest(SESSION, "m", SMALL.fingerprint, [KEY], 64, 1.0)
    assert await theirs.put_manifest(manifest)
    assert await theirs.tombstones.put(Tombstone(SESSION, 4, {}))
    assert await theirs.tombstones.put_confirmed("node-0", ["tombstones/a/b/c"])
    assert await ours.find_manifest(SESSION) is Fault.CORRUPT
    assert [page async for page in ours.manifests()] == [[]]
    assert (await ours.tombstones.list_all()).by_path == {}
    assert await ours.tombstones.find(SESSION) == []
    assert await ours.tombstones.list_confirmed() == {"node-0": frozenset()}
    assert await ours.put_manifest(manifest)
    assert await ours.get_manifest(SESSION) == manifest


async def test_a_forged_file_or_object_is_deleted_and_not_served(tmp_path, arena):
    write = written(arena)
    data = object_of(arena, write)
    header = encode_header(OTHER_CLUSTER, replace(chunk(None).header, key=KEY))
    forged = header + data[len(header) :]
    blob = BlobTier(MemoryStore(), arena, KEYS)
    await blob.write(KEY, SHAPE.fingerprint, forged)
    assert await blob.locate(KEY, SHAPE.fingerprint) is Fault.CORRUPT
    assert await blob.locate(KEY, SHAPE.fingerprint) is Fault.MISSING
    io = ThreadFileIo(arena)
    ssd = SsdTier(tmp_path / "ssd", arena, KEYS, io, io)
    path = ssd.path(KEY, SHAPE.fingerprint)
    path.parent.mkdir(parents=True)
    path.write_bytes(forged)
    recovery = ssd.recover()
    ssd.close()
    assert not recovery.copies and recovery.deleted == 1 and not path.exists()
