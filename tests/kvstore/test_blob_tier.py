"""The blob tier keeps its guarantees on every store that obstore reaches: a directory, S3 servers with and without
ranges, Azure's emulator, GCS's client, and memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import obstore
import pytest
from obstore.exceptions import GenericError
from obstore.store import MemoryStore

from contracts.errors import ConfigError
from contracts.ids import SessionKey
from contracts.kv import Manifest
from kvstore.core.events import Fault
from kvstore.core.instructions import WriteSsd
from kvstore.core.tombstone import Tombstone
from kvstore.tiers.blob import BlobTier, chunk_path
from kvstore.tiers.catalogue import Catalogue
from kvstore.tiers.format import object_bytes, piece_offset
from kvstore.tiers.manifests import decode_manifest, manifest_path
from kvstore.tiers.objects import open_store
from kvstore.tiers.staged import remove_staged
from kvstore.tiers.tombstones import confirmed_by_all
from runtime.clock import RealClock
from tests.blob_servers import BlobServer, azurite, azurite_command, gcs, moto_s3, rclone_s3
from tests.kvstore.tier_harness import (
    BIG,
    KEY,
    KEYS,
    MIB,
    OTHER_KEY,
    SHAPE,
    arena,
    assert_same,
    big_arena,
    digests,
    object_of,
    wanted,
    written,
)

__all__ = ["arena", "big_arena"]

SESSIONS = [SessionKey("tenant", "s:1"), SessionKey("tenant", "..x"), SessionKey("../etc", "s")]


@pytest.fixture(scope="module", params=["memory", "directory", "s3 without ranges", "s3 with ranges", "azure", "gcs"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlobServer | None]:
    """What serves the store; None: nothing has to."""
    root = tmp_path_factory.mktemp("objects")
    with contextlib.ExitStack() as stack:
        if request.param == "s3 without ranges":
            yield stack.enter_context(rclone_s3(root))
        elif request.param == "s3 with ranges":
            yield stack.enter_context(moto_s3())
        elif request.param == "gcs":
            yield stack.enter_context(gcs(root))
        elif request.param == "azure":
            command = azurite_command()
            if command is None:
                pytest.skip("Azure's emulator is not installed: make azurite")
            yield stack.enter_context(azurite(command))
        else:
            yield BlobServer("" if request.param == "directory" else "memory", 0)


@pytest.fixture
def store(server: BlobServer, tmp_path: Path):
    """An empty store: a prefix of its own."""
    if server.url == "memory":
        return MemoryStore()
    url = f"{server.url}/{os.urandom(6).hex()}" if server.url else ""
    return open_store(url, server.options, tmp_path / "blob")


@pytest.fixture
def blob(store, arena, tmp_path) -> Iterator[BlobTier]:
    catalogue = Catalogue(tmp_path / "sessions.sqlite", "", partial(decode_manifest, KEYS), RealClock())
    yield BlobTier(store, arena, KEYS, None, catalogue)
    catalogue.close()


async def put(blob: BlobTier, arena, write: WriteSsd) -> None:
    assert await blob.write(write.key, write.shape.fingerprint, object_of(arena, write))


# ---- chunks


async def test_a_chunk_comes_back_whole_and_in_parts_from_memory_and_from_a_file(blob, arena, tmp_path):
    write, second = written(arena), written(arena, OTHER_KEY, MIB)
    await put(blob, arena, write)
    file = tmp_path / "object"
    file.write_bytes(object_of(arena, second))
    assert await blob.write(OTHER_KEY, SHAPE.fingerprint, file)
    for w in (write, second):
        found = await blob.probe(w.key, SHAPE.fingerprint)
        assert found is not None and (found.key, found.shape, found.checksums) == (w.key, SHAPE, digests(arena, w))
        for layers in (range(5), range(1), range(2, 4), range(4, 5)):
            pieces = wanted(arena, w, layers)
            assert await blob.read(SHAPE, pieces) == {}
            assert_same(arena, w, pieces)


async def test_a_read_says_when_it_can_no_longer_be_taken_back_and_not_when_nothing_came(blob, arena):
    write = written(arena)
    await put(blob, arena, write)
    entered: list[str] = []
    assert await blob.read(SHAPE, wanted(arena, write, range(5)), {}, lambda: entered.append("came")) == {}
    assert set(
        (
            await blob.read(
                SHAPE, wanted(arena, written(arena, OTHER_KEY), range(5)), {}, lambda: entered.append("nothing")
            )
        ).values()
    ) == {Fault.MISSING}
    assert entered == ["came"]


async def test_an_object_of_many_megabytes_that_is_sent_in_parts(store, big_arena, tmp_path):
    blob, write = BlobTier(store, big_arena, KEYS), written(big_arena, shape=BIG)
    data = object_of(big_arena, write)
    assert len(data) > 10 * MIB
    (tmp_path / "object").write_bytes(data)
    for source in (data, tmp_path / "object"):
        assert await blob.write(KEY, BIG.fingerprint, source)
        found = await blob.probe(KEY, BIG.fingerprint)
        assert found is not None and found.checksums == digests(big_arena, write)
        big_arena.view[BIG.chunk_bytes :] = bytes(BIG.chunk_bytes)
        pieces = wanted(big_arena, write, range(4), BIG.chunk_bytes)
        assert await blob.read(BIG, pieces) == {}
        assert_same(big_arena, write, pieces)
        await blob.delete_chunk(KEY, BIG.fingerprint)


async def test_what_is_not_there_is_missing_and_deleting_it_twice_is_nothing(blob, arena):
    write = written(arena)
    for _ in range(2):
        assert await blob.probe(KEY, SHAPE.fingerprint) is None
        assert set((await blob.read(SHAPE, wanted(arena, write, range(5)))).values()) == {Fault.MISSING}
        await blob.delete_chunk(KEY, SHAPE.fingerprint)
    await put(blob, arena, write)
    for _ in range(2):
        await blob.delete_chunk(KEY, SHAPE.fingerprint)
    assert await blob.probe(KEY, SHAPE.fingerprint) is None


async def test_a_second_write_replaces_the_first(blob, arena):
    first, second = written(arena), written(arena, KEY, MIB)
    await put(blob, arena, first)
    await put(blob, arena, second)
    found = await blob.probe(KEY, SHAPE.fingerprint)
    assert found is not None and found.checksums == digests(arena, second)
    assert await blob.read(SHAPE, wanted(arena, second, range(5))) == {}
    assert set((await blob.read(SHAPE, wanted(arena, first, range(5)))).values()) == {Fault.CORRUPT}


async def test_a_flipped_bit_is_that_pieces_fault_only(blob, arena):
    write = written(arena)
    flipped = bytearray(object_of(arena, write))
    flipped[piece_offset(SHAPE, 1)] ^= 1
    await blob.write(KEY, SHAPE.fingerprint, bytes(flipped))
    assert await blob.read(SHAPE, wanted(arena, write, range(5))) == {1: Fault.CORRUPT}
    assert await blob.read(SHAPE, wanted(arena, write, range(2, 5))) == {}


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 10_000, -1, 1 << 20])
async def test_an_object_of_the_wrong_size_is_a_fault_and_is_deleted_when_it_is_looked_for(blob, arena, size):
    write = written(arena)
    whole = object_of(arena, write)
    wrong = whole[:size] if size < len(whole) else whole.ljust(size, b"\0")
    await blob.write(KEY, SHAPE.fingerprint, wrong)
    assert set((await blob.read(SHAPE, wanted(arena, write, range(3, 5)))).values()) == {Fault.CORRUPT}
    assert await blob.probe(KEY, SHAPE.fingerprint) is None
    assert set((await blob.read(SHAPE, wanted(arena, write, range(5)))).values()) == {Fault.MISSING}


async def test_damaged_objects_are_no_reason_to_leave_the_store_alone(blob, arena):
    for i in range(6):
        await blob.write(bytes([i]) * 32, SHAPE.fingerprint, b"")
        assert await blob.probe(bytes([i]) * 32, SHAPE.fingerprint) is None
    await put(blob, arena, written(arena))
    assert await blob.probe(KEY, SHAPE.fingerprint) is not None


async def test_a_header_of_another_chunk_or_of_none_deletes_the_object(blob, arena):
    other = object_of(arena, written(arena, OTHER_KEY))
    for nonsense in (other, b"\0" * len(other), os.urandom(len(other))):
        await blob.write(KEY, SHAPE.fingerprint, nonsense)
        assert await blob.probe(KEY, SHAPE.fingerprint) is None
        assert not [page async for page in blob.list_chunks(SHAPE.fingerprint)]


async def test_calls_at_the_same_time_do_not_mix(blob, arena):
    size = SHAPE.chunk_bytes
    writes = [written(arena, bytes([65 + i]) * 32, i * size) for i in range(16)]
    await asyncio.gather(*(put(blob, arena, w) for w in writes))
    reads = [wanted(arena, w, range(5), 2 * MIB + i * size) for i, w in enumerate(writes)]
    assert 16 * size <= 2 * MIB
    assert await asyncio.gather(*(blob.read(SHAPE, pieces) for pieces in reads)) == [{}] * 16
    for w, pieces in zip(writes, reads, strict=True):
        assert_same(arena, w, pieces)
    found = await asyncio.gather(*(blob.probe(w.key, SHAPE.fingerprint) for w in writes))
    assert [f and f.checksums for f in found] == [digests(arena, w) for w in writes]


async def test_a_cancelled_call_harms_none_that_follows(blob, arena):
    write = written(arena)
    await put(blob, arena, write)
    calls = [asyncio.ensure_future(blob.probe(KEY, SHAPE.fingerprint)) for _ in range(4)]
    calls += [
        asyncio.ensure_future(blob.write(OTHER_KEY, SHAPE.fingerprint, object_of(arena, written(arena, OTHER_KEY))))
        for _ in range(4)
    ]
    await asyncio.sleep(0)
    for call in calls:
        call.cancel()
    ended = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(e, asyncio.CancelledError) for e in ended)
    assert await blob.probe(KEY, SHAPE.fingerprint) is not None
    half = await blob.probe(OTHER_KEY, SHAPE.fingerprint)
    assert half is None or half.shape == SHAPE, "an object is there whole or not at all"
    assert await blob.read(SHAPE, wanted(arena, write, range(5))) == {}


async def test_chunks_are_listed_by_model_completely_or_not_at_all(blob, arena):
    keys = {bytes([i]) * 32 for i in range(30)}
    data = object_of(arena, written(arena))
    await asyncio.gather(*(blob.write(key, SHAPE.fingerprint, data) for key in keys))
    await blob.write(KEY, b"another model".ljust(32), data)
    assert {key async for page in blob.list_chunks(SHAPE.fingerprint) for key in page} == keys
    assert not [page async for page in blob.list_chunks(b"no model".ljust(32))]


# ---- manifests


async def all_manifests(tier: BlobTier) -> list[Manifest]:
    return [m async for page in tier.manifests() for m in page]


async def test_manifests_are_stored_listed_replaced_and_deleted(blob):
    manifests = [Manifest(s, "m", b"f" * 32, [KEY], 16, 1.0) for s in SESSIONS]
    for m in manifests:
        assert await blob.put_manifest(m)
    assert sorted(await all_manifests(blob), key=str) == sorted(manifests, key=str)
    newer = Manifest(SESSIONS[0], "m", b"f" * 32, [KEY, OTHER_KEY], 32, 2.0)
    await blob.put_manifest(newer)
    assert await blob.get_manifest(SESSIONS[0]) == newer
    for _ in range(2):
        await blob.delete_manifest(SESSIONS[0])
        assert await blob.get_manifest(SESSIONS[0]) is None
    assert len(await all_manifests(blob)) == 2


async def test_a_listing_reads_only_what_has_changed_since_the_last_one(blob, monkeypatch):
    get, asked = blob._objects.get, []

    async def counted(path: str) -> bytes:
        asked.append(path)
        return await get(path)

    monkeypatch.setattr(blob._objects, "get", counted)
    known = {s: Manifest(s, "m", b"f" * 32, [KEY], 16, 1.0) for s in SESSIONS}

    async def listed() -> list[str]:
        asked.clear()
        assert {m.session: m for m in await all_manifests(blob)} == known
        return sorted(asked)

    for m in known.values():
        await blob.put_manifest(m)
    assert await listed() == sorted(map(manifest_path, SESSIONS))
    assert await listed() == []
    known[SESSIONS[1]] = Manifest(SESSIONS[1], "m", b"f" * 32, [OTHER_KEY], 16, 2.0)  # as long as before
    await blob.put_manifest(known[SESSIONS[1]])
    assert await listed() == [manifest_path(SESSIONS[1])]
    await blob.delete_manifest(SESSIONS[0])
    before = known.pop(SESSIONS[0])
    assert await listed() == []
    await blob.put_manifest(before)
    known[SESSIONS[0]] = before
    assert await listed() == [manifest_path(SESSIONS[0])]


async def test_a_damaged_manifest_is_none_and_hides_no_other(blob, store):
    manifests = [Manifest(s, "m", b"f" * 32, [KEY], 16, 1.0) for s in SESSIONS]
    for m in manifests:
        await blob.put_manifest(m)
    await obstore.put_async(store, manifest_path(SESSIONS[1]), b"nonsense")
    assert await blob.get_manifest(SESSIONS[1]) is None
    assert {m.session for m in await all_manifests(blob)} == {SESSIONS[0], SESSIONS[2]}


# ---- tombstones


async def test_tombstones_stand_beside_each_other_and_go_when_every_node_has_confirmed_them(blob, store):
    tier, session = blob.tombstones, SESSIONS[0]
    first, second = Tombstone(session, 1, {KEY: b"f" * 32}), Tombstone(session, 1, {OTHER_KEY: b"f" * 32})
    for tombstone in (first, second, first):
        assert not await tier.has(tombstone) or tombstone is first
        assert await tier.put(tombstone) and await tier.has(tombstone)
    listing = await tier.list_all()
    assert listing.complete and sorted(map(str, listing.by_path.values())) == sorted(map(str, (first, second)))
    assert (
        sorted(map(str, await tier.find(session))) == sorted(map(str, (first, second)))
        and await tier.find(SESSIONS[1]) == []
    )
    paths = list(listing.by_path)
    assert await tier.put_confirmed("node-0", paths) and await tier.put_confirmed("node-1", paths[:1])
    confirmed = await tier.list_confirmed()
    assert confirmed_by_all(paths, confirmed, ["node-0", "node-1"]) == paths[:1]
    assert confirmed_by_all(paths, confirmed, ["node-0"]) == paths[:1], (
        "a node that has ever confirmed anything may come back"
    )
    assert confirmed_by_all(paths, confirmed, ["node-0", "node-2"]) == [], (
        "one that has not been here yet may have something"
    )
    await tier.delete(paths[0])
    await obstore.put_async(store, paths[1], b"nonsense")
    assert await tier.list_all() == ({}, True)


# ---- a store that is not there


async def test_a_store_that_is_not_there_is_a_miss_in_bounded_time(arena, tmp_path):
    options = {"endpoint": "http://127.0.0.1:9", "access_key_id": "a", "secret_access_key": "b", "region": "us-east-1"}
    away = BlobTier(open_store("s3://bucket", options, tmp_path), arena, KEYS)
    async with asyncio.timeout(60):
        assert await away.probe(KEY, SHAPE.fingerprint) is None
        assert await away.get_manifest(SESSIONS[0]) is None
        assert set((await away.read(SHAPE, wanted(arena, written(arena), range(5)))).values()) == {Fault.UNAVAILABLE}
        assert not await away.write(KEY, SHAPE.fingerprint, b"x")
        with pytest.raises(GenericError):
            await anext(away.list_chunks(SHAPE.fingerprint))
        with pytest.raises(OSError, match="cannot be listed"):
            await all_manifests(away)
        assert not (await away.tombstones.list_all()).complete and await away.tombstones.list_confirmed() is None
        await away.delete_chunk(KEY, SHAPE.fingerprint)


async def test_a_directory_that_cannot_be_made_at_start_is_used_when_it_can(arena, tmp_path):
    path = tmp_path / "blob"
    path.write_text("not a directory")
    tier = BlobTier(open_store("", {}, path), arena, KEYS)
    assert await tier.locate(KEY, SHAPE.fingerprint) is Fault.UNAVAILABLE
    assert not await tier.answers() and not await tier.try_write("node-0")
    with pytest.raises(OSError):  # noqa: PT011 - in the words of the file system
        await all_manifests(tier)
    path.unlink()
    assert await tier.answers() and await tier.try_write("node-0")
    assert await tier.locate(KEY, SHAPE.fingerprint) is Fault.MISSING


def test_a_url_that_names_no_store_is_refused_with_key_and_remedy(tmp_path):
    with pytest.raises(ConfigError, match=r"kv\.blob_url .*give s3://"):
        open_store("gopher://nowhere", {}, tmp_path)


def test_objects_lie_where_the_format_says():
    assert chunk_path(KEY, SHAPE.fingerprint) == f"chunks/{'66' * 8}/{KEY.hex()}"
    assert object_bytes(SHAPE) % 4096 == 0


def test_files_that_a_killed_process_was_writing_are_removed_and_those_of_a_living_one_are_not(tmp_path):
    names = {
        "chunks/m/dead#1": 1000.0,
        "manifests/t/dead#12": 1000.0,
        "chunks/m/alive#1": 1990.0,
        "chunks/m/whole": 1000.0,
    }
    for name, written_s in names.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
        os.utime(tmp_path / name, (written_s, written_s))
    assert remove_staged(tmp_path, 2000.0) == 2
    assert {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()} == {
        "chunks/m/alive#1",
        "chunks/m/whole",
    }
