"""Slow tiers with a codec: what is read is what the codec keeps, raw stays readable, and nothing that was changed is
believed."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from obstore.store import MemoryStore

from contracts.errors import ConfigError
from kvstore.core.events import BlobWritten, Event, Fault, Wrote
from kvstore.core.instructions import FetchPiece, WriteBlob, WriteSsd
from kvstore.tiers.blob import BlobTier
from kvstore.tiers.codec import Codec
from kvstore.tiers.codecs import Codecs
from kvstore.tiers.encoded import encode_chunk, views
from kvstore.tiers.encoded_files import EncodedFiles
from kvstore.tiers.file_io import ThreadFileIo
from kvstore.tiers.format import RAW, decode_header, object_bytes
from kvstore.tiers.ssd import SsdTier
from kvstore.writeback import WriteBack
from runtime.clock import RealClock
from runtime.service import Tasks
from tests.kvstore.fake_codec import STUBBORN, Upper, lossy, with_upper, without
from tests.kvstore.tier_harness import (
    KEY,
    KEYS,
    MIB,
    OTHER_KEY,
    SHAPE,
    arena,
    assert_same,
    digests,
    object_of,
    wanted,
    written,
)

__all__ = ["arena"]


_made: list[SsdTier] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Tiers' threads end with the test."""
    yield
    while _made:
        _made.pop().close()


def make_ssd(tmp_path: Path, arena, codec: Codec | None, codecs: Codecs | None = None) -> SsdTier:
    made = SsdTier(
        tmp_path / "ssd",
        arena,
        KEYS,
        ThreadFileIo(arena),
        ThreadFileIo(arena),
        encoded=EncodedFiles(arena, KEYS, codecs or with_upper(), codec),
    )
    _made.append(made)
    return made


def stored_wanted(arena, ssd: SsdTier, write: WriteSsd, layers: range) -> list[FetchPiece]:
    """Pieces as the core asks for them: with the checksums of the copy."""
    header = ssd.encoded.header(write.key)
    assert header is not None
    return wanted(arena, write, layers, sums=header.checksums)


def assert_lossy(arena, write: WriteSsd, pieces: list[FetchPiece], sums: dict[int, int]) -> None:
    """What was brought is what the codec keeps of what was written, and `sums` is right."""
    size = write.shape.piece_bytes
    for i, p in enumerate(pieces):
        original = arena.view[write.offsets[p.layer] :][:size]
        assert bytes(arena.view[p.offset : p.offset + size]) == lossy(original)
        assert sums[i] == arena.checksum(p.offset, size)


def test_an_encoded_chunk_comes_back_from_the_ssd_whole_in_parts_and_after_a_restart(tmp_path, arena):
    ssd, write = make_ssd(tmp_path, arena, Upper()), written(arena)
    assert ssd.write([write]) == [Wrote.OK]
    file = ssd.path(KEY, SHAPE.fingerprint)
    assert file.stat().st_size == decode_header(KEYS, file.read_bytes()).layout.object_bytes < object_bytes(SHAPE)
    again = make_ssd(tmp_path, arena, None)
    (copy,) = again.recover().copies
    header = ssd.encoded.header(KEY)
    assert header is not None and (copy.key, copy.checksums) == (KEY, header.checksums)
    for tier in (ssd, again):
        for layers in (range(5), range(1), range(2, 4)):
            pieces = stored_wanted(arena, ssd, write, layers)
            sums: dict[int, int] = {}
            assert tier.read(SHAPE, pieces, sums) == {}
            assert_lossy(arena, write, pieces, sums)


def test_pieces_that_are_not_k_and_v_of_heads_are_stored_raw(arena):
    write, latent = written(arena), replace(SHAPE, kv_heads=1)
    stored = encode_chunk(KEYS, KEY, latent, views(arena, latent, write.offsets), write.checksums, Upper())
    assert (
        latent.piece_bytes == SHAPE.piece_bytes
        and stored.header.layout.codec == RAW
        and len(stored.to_bytes()) == object_bytes(latent)
    )


def test_raw_files_are_read_by_a_store_with_a_codec_and_replaced_files_by_their_new_layout(tmp_path, arena):
    write = written(arena)
    make_ssd(tmp_path, arena, None).write([write])
    ssd = make_ssd(tmp_path, arena, Upper())
    assert [c.checksums for c in ssd.recover().copies] == [digests(arena, write)]
    assert ssd.read(SHAPE, wanted(arena, write, range(5))) == {}
    assert_same(arena, write, wanted(arena, write, range(5)))
    ssd.delete(KEY, SHAPE.fingerprint)
    ssd.write([write])
    assert ssd.read(SHAPE, stored_wanted(arena, ssd, write, range(5)), {}) == {}
    ssd.delete(KEY, SHAPE.fingerprint)
    assert ssd.encoded.header(KEY) is None
    assert set(ssd.read(SHAPE, wanted(arena, write, range(5))).values()) == {Fault.MISSING}


def test_a_file_of_a_codec_that_is_not_here_is_a_miss_and_stays(tmp_path, arena):
    ssd, write = make_ssd(tmp_path, arena, Upper()), written(arena)
    ssd.write([write])
    poor = make_ssd(tmp_path, arena, None, without())
    recovery = poor.recover()
    assert (recovery.copies, recovery.deleted) == ([], 0)
    assert ssd.path(KEY, SHAPE.fingerprint).exists()
    assert poor.write([write]) == [Wrote.OK]  # and gives way to a new one
    assert poor.read(SHAPE, wanted(arena, write, range(5))) == {}


def test_a_chunk_that_the_codec_cannot_hold_is_stored_raw(tmp_path, arena):
    write = written(arena)
    arena.view[write.offsets[3] : write.offsets[3] + 8] = STUBBORN
    write = written(arena)
    ssd = make_ssd(tmp_path, arena, Upper())
    assert ssd.write([write]) == [Wrote.OK]
    assert ssd.encoded.header(KEY) is None
    assert ssd.read(SHAPE, wanted(arena, write, range(5))) == {}
    assert_same(arena, write, wanted(arena, write, range(5)))


def test_damage_in_the_arena_gets_no_good_checksum_by_being_encoded(tmp_path, arena):
    write = written(arena)
    arena.view[write.offsets[2] + 5] ^= 1
    ssd = make_ssd(tmp_path, arena, Upper())
    assert ssd.write([write]) == [Wrote.OK]
    sums = ssd.header(KEY, SHAPE).checksums
    assert ssd.read(SHAPE, wanted(arena, write, range(5), sums=sums)) == {2: Fault.CORRUPT}


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_flipped_bit_of_an_encoded_file_is_served(tmp_path, arena, data):
    ssd, write = make_ssd(tmp_path, arena, Upper()), written(arena)
    assert ssd.write([write]) == [Wrote.OK]
    path = ssd.path(KEY, SHAPE.fingerprint)
    content = bytearray(path.read_bytes())
    bit = data.draw(st.integers(0, len(content) * 8 - 1))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    header = ssd.encoded.header(KEY)
    assert header is not None
    layout, pieces, sums = header.layout, stored_wanted(arena, ssd, write, range(5)), {}
    faults = ssd.read(SHAPE, pieces, sums)
    hit = {
        i
        for i, (at, length) in enumerate(zip(layout.offsets[:-1], layout.lengths, strict=True))
        if at <= bit // 8 < at + length
    }
    assert faults == dict.fromkeys(hit, Fault.CORRUPT)
    assert_lossy(
        arena, write, [p for p in pieces if p.layer not in hit], dict(enumerate(v for _, v in sorted(sums.items())))
    )
    in_header = bit // 8 < layout.offsets[0]
    assert len(make_ssd(tmp_path, arena, None).recover().copies) == (0 if in_header else 1)


# ---- the blob tier


async def test_an_encoded_object_is_found_and_read_by_every_node_that_has_the_codec(arena):
    write, store = written(arena), MemoryStore()
    stored = encode_chunk(KEYS, KEY, SHAPE, views(arena, SHAPE, write.offsets), write.checksums, Upper())
    writer, reader, poor = (
        BlobTier(store, arena, KEYS, with_upper()),
        BlobTier(store, arena, KEYS, with_upper()),
        BlobTier(store, arena, KEYS, without()),
    )
    assert await writer.write(KEY, SHAPE.fingerprint, stored.to_bytes(), stored.header)
    found = await reader.probe(KEY, SHAPE.fingerprint)
    assert found is not None and found.checksums == stored.header.checksums
    for tier in (
        writer,
        reader,
        BlobTier(store, arena, KEYS, with_upper()),
    ):  # the last one knows nothing of its layout
        for layers in (range(5), range(1), range(2, 4)):
            pieces = wanted(arena, write, layers, sums=found.checksums)
            sums: dict[int, int] = {}
            assert await tier.read(SHAPE, pieces, sums) == {}
            assert_lossy(arena, write, pieces, sums)
    assert await poor.probe(KEY, SHAPE.fingerprint) is None
    assert await writer.probe(KEY, SHAPE.fingerprint) is not None


async def test_an_object_that_another_node_has_replaced_by_its_own_codec_is_read(arena):
    write, store = written(arena), MemoryStore()
    stored = encode_chunk(KEYS, KEY, SHAPE, views(arena, SHAPE, write.offsets), write.checksums, Upper())
    tier = BlobTier(store, arena, KEYS, with_upper())
    assert await tier.write(KEY, SHAPE.fingerprint, object_of(arena, write))
    other = BlobTier(store, arena, KEYS, with_upper())
    assert await other.write(KEY, SHAPE.fingerprint, stored.to_bytes(), stored.header)
    sums: dict[int, int] = {}
    assert await tier.read(SHAPE, wanted(arena, write, range(5)), sums) == {}
    assert_lossy(arena, write, wanted(arena, write, range(5)), sums)
    await other.write(KEY, SHAPE.fingerprint, object_of(arena, write))
    sums = {}
    assert await tier.read(SHAPE, wanted(arena, write, range(5), sums=stored.header.checksums), sums) == {}
    assert_same(arena, write, wanted(arena, write, range(5)))
    assert sums == dict(enumerate(write.checksums))


async def test_a_flipped_bit_of_an_encoded_object_is_that_pieces_fault_only(arena):
    write, store = written(arena), MemoryStore()
    stored = encode_chunk(KEYS, KEY, SHAPE, views(arena, SHAPE, write.offsets), write.checksums, Upper())
    data = bytearray(stored.to_bytes())
    data[stored.header.layout.offsets[1] + 3] ^= 8
    tier = BlobTier(store, arena, KEYS, with_upper())
    await tier.write(KEY, SHAPE.fingerprint, bytes(data), stored.header)
    assert await tier.read(SHAPE, wanted(arena, write, range(5), sums=stored.header.checksums)) == {1: Fault.CORRUPT}


@pytest.mark.parametrize("ssd_codec", [None, Upper()], ids=["raw", "upper"])
@pytest.mark.parametrize("blob_codec", [None, Upper()], ids=["raw", "upper"])
async def test_the_blob_copy_is_by_the_blob_tiers_codec_whatever_the_ssds_is(tmp_path, arena, ssd_codec, blob_codec):
    from_file, from_arena = written(arena), written(arena, OTHER_KEY, MIB)
    ssd, blob = make_ssd(tmp_path, arena, ssd_codec), BlobTier(MemoryStore(), arena, KEYS, with_upper())
    assert ssd.write([from_file]) == [Wrote.OK]
    header = ssd.encoded.header(KEY)
    events: asyncio.Queue[Event] = asyncio.Queue()
    write_back = WriteBack(ssd, blob, arena, KEYS, RealClock(), events.put_nowait, Tasks(), blob_codec)
    write_back.blob(WriteBlob(KEY, SHAPE, (), header.checksums if header is not None else digests(arena, from_file)))
    write_back.blob(WriteBlob(OTHER_KEY, SHAPE, from_arena.offsets, from_arena.checksums))
    for _ in range(2):
        event = await asyncio.wait_for(events.get(), 20)
        assert isinstance(event, BlobWritten) and event.outcome is Wrote.OK
        found = await blob.probe(event.key, SHAPE.fingerprint)
        assert found is not None and found.checksums == event.sums
        write = from_file if event.key == KEY else from_arena
        went_through = blob_codec or (event.key == KEY and ssd_codec)
        pieces = wanted(arena, write, range(5), sums=event.sums)
        sums: dict[int, int] = {}
        assert await blob.read(SHAPE, pieces, sums) == {}
        if went_through:
            sums = {i: arena.checksum(p.offset, SHAPE.piece_bytes) for i, p in enumerate(pieces)}
            assert_lossy(arena, write, pieces, sums)
        else:
            assert_same(arena, write, pieces)
    write_back.close()


async def test_a_damaged_ssd_file_is_not_converted_into_a_good_object(tmp_path, arena):
    write = written(arena)
    ssd, blob = make_ssd(tmp_path, arena, Upper()), BlobTier(MemoryStore(), arena, KEYS, with_upper())
    ssd.write([write])
    header = ssd.encoded.header(KEY)
    assert header is not None
    path = ssd.path(KEY, SHAPE.fingerprint)
    data = bytearray(path.read_bytes())
    data[header.layout.offsets[4] + 1] ^= 1
    path.write_bytes(data)
    events: asyncio.Queue[Event] = asyncio.Queue()
    write_back = WriteBack(ssd, blob, arena, KEYS, RealClock(), events.put_nowait, Tasks(), None)
    write_back.blob(WriteBlob(KEY, SHAPE, (), header.checksums))
    event = await asyncio.wait_for(events.get(), 20)
    assert isinstance(event, BlobWritten) and event.outcome is not Wrote.OK
    assert await blob.probe(KEY, SHAPE.fingerprint) is None
    write_back.close()


# ---- what is configured


def test_raw_needs_nothing_and_a_codec_that_does_not_work_stops_the_start_with_the_remedy():
    assert with_upper().configured("kv.ssd_codec", RAW) is None
    assert with_upper().configured("kv.ssd_codec", "upper") is not None
    with pytest.raises(ConfigError, match=r"kv\.blob_codec = 'missing'.*install it; or set kv\.blob_codec: raw"):
        with_upper().configured("kv.blob_codec", "missing")


def test_a_read_that_was_taken_back_before_it_began_is_left_out(tmp_path, arena):
    ssd, write = make_ssd(tmp_path, arena, Upper()), written(arena)
    ssd.write([write])
    answer: queue.SimpleQueue[dict[int, Fault]] = queue.SimpleQueue()
    pieces = stored_wanted(arena, ssd, write, range(5))
    before = bytes(arena.view[pieces[0].offset :][: SHAPE.piece_bytes])
    ssd.begin_read(SHAPE, pieces, answer.put, {}, lambda: True)
    assert answer.get(timeout=20) == dict.fromkeys(range(5), Fault.CANCELLED)
    assert bytes(arena.view[pieces[0].offset :][: SHAPE.piece_bytes]) == before
