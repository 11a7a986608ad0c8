"""The SSD tier: what is committed comes back, whatever else lies on the disk; with each way of moving bytes."""

from __future__ import annotations

import errno
import os
import queue
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from contracts.errors import ConfigError
from contracts.kv import KvShape
from kvstore.core.chunk import UNREAD
from kvstore.core.events import Fault, Wrote
from kvstore.core.instructions import FetchPiece, WriteSsd
from kvstore.tiers import page_cache
from kvstore.tiers import ssd as ssd_module
from kvstore.tiers.file_io import ThreadFileIo, direct_works
from kvstore.tiers.format import Header, encode_header, object_bytes, piece_offset, raw_layout
from kvstore.tiers.ssd import SsdTier
from tests.kvstore.fake_tiers import FakeFileIo
from tests.kvstore.tier_harness import (
    KEY,
    KEYS,
    MIB,
    OTHER_KEY,
    SHAPE,
    arena,
    assert_same,
    file_io,
    wanted,
    written,
)

__all__ = ["arena", "file_io"]


#: Pieces of whole pages, as models have them: they are read and written past the page cache.
ROUND = KvShape.of_heads(b"r" * 32, 5, 2, 16, 16, "float32")


@pytest.fixture
def ssd(file_io, tmp_path: Path, arena) -> Iterator[SsdTier]:
    tier = SsdTier(tmp_path / "ssd", arena, KEYS, file_io, file_io)
    yield tier
    tier.close()


def test_a_chunk_comes_back_from_the_ssd_whole_and_in_parts(ssd, arena):
    write = written(arena)
    assert ssd.write([write]) == [Wrote.OK]
    for layers in (range(5), range(2), range(3, 5)):
        pieces = wanted(arena, write, layers)
        assert ssd.read(SHAPE, pieces) == {}
        assert_same(arena, write, pieces)


def damage(ssd: SsdTier, arena) -> dict[bytes, WriteSsd]:
    """A good chunk, and by key: one that is short, one with a flipped bit in its header, one of another's name, and one
    of another shape."""
    made = {key: written(arena, key) for key in (KEY, b"s" * 32, b"h" * 32, b"r" * 32, b"l" * 32)}
    assert ssd.write(list(made.values())) == [Wrote.OK] * 5
    paths = {key: ssd.path(key, SHAPE.fingerprint) for key in made}
    os.truncate(paths[b"s" * 32], object_bytes(SHAPE) - 1)
    header = paths[b"h" * 32]
    header.write_bytes(header.read_bytes()[:40] + b"\x55" + header.read_bytes()[41:])
    paths[b"r" * 32].write_bytes(paths[KEY].read_bytes())
    other = KvShape.of_heads(SHAPE.fingerprint, 5, 3, 17, 32, "float32")
    paths[b"l" * 32].write_bytes(
        encode_header(KEYS, Header(b"l" * 32, other, raw_layout(other), (0,) * 5)).ljust(object_bytes(other), b".")
    )
    return made


def unread(pieces: list[FetchPiece]) -> list[FetchPiece]:
    """The pieces as the core wants them of a file that was only listed."""
    return [replace(p, checksum=UNREAD) for p in pieces]


def test_recovery_lists_files_by_name_and_deletes_what_is_none(ssd, arena):
    write = written(arena)
    assert ssd.write([write]) == [Wrote.OK]
    folder = ssd.path(KEY, SHAPE.fingerprint).parent
    for name in ("not-hexadecimal", KEY.hex().upper(), KEY.hex()[2:], f"{OTHER_KEY.hex()}.part"):
        (folder / name).write_bytes(b"torn")
    (folder / OTHER_KEY.hex()).symlink_to(folder / KEY.hex())
    os.mkfifo(folder / (b"p" * 32).hex())
    recovery = ssd.recover()
    assert (recovery.listed, recovery.copies, recovery.deleted) == ([(SHAPE, [KEY])], [], 6)
    assert [p.name for p in folder.iterdir()] == [KEY.hex()]


def test_the_header_of_a_listed_file_is_checked_before_a_piece_of_it_is_served(ssd, arena):
    writes = damage(ssd, arena)
    for key, write in writes.items():
        for layers in (range(5), [3]):
            pieces, sums = unread(wanted(arena, write, layers)), {}
            faults = ssd.read(SHAPE, pieces, sums)
            if key == KEY:
                assert (faults, sums) == ({}, {i: write.checksums[p.layer] for i, p in enumerate(pieces)})
                assert_same(arena, write, pieces)
            else:
                assert set(faults.values()) == {Fault.CORRUPT} and not sums
    ssd.delete(KEY, SHAPE.fingerprint)
    assert ssd.read(SHAPE, unread(wanted(arena, writes[KEY], [0]))) == {0: Fault.MISSING}


def test_where_headers_disagree_each_is_read_and_the_damaged_are_deleted(ssd, arena):
    damage(ssd, arena)
    recovery = ssd.recover()
    assert recovery.listed == [] and recovery.deleted == 3
    assert {c.key: c.shape.chunk_tokens for c in recovery.copies} == {KEY: 16, b"l" * 32: 32}


def test_more_headers_than_are_kept_are_read_again(ssd, arena, monkeypatch):
    monkeypatch.setattr(ssd_module, "_HEADERS_KEPT", 3)
    writes = [written(arena, bytes([n]) * 32) for n in range(10)]
    assert ssd.write(writes) == [Wrote.OK] * 10
    for write in writes * 2:
        assert ssd.read(SHAPE, unread(wanted(arena, write, range(5)))) == {}
        assert_same(arena, write, wanted(arena, write, range(5)))
    assert len(ssd._digests) == 3


def test_a_flipped_bit_in_a_piece_is_that_pieces_fault_only(ssd, arena):
    write = written(arena)
    ssd.write([write])
    path = ssd.path(KEY, SHAPE.fingerprint)
    data = bytearray(path.read_bytes())
    data[piece_offset(SHAPE, 2) + 9] ^= 4
    path.write_bytes(data)
    assert ssd.read(SHAPE, wanted(arena, write, range(5))) == {2: Fault.CORRUPT}


def test_a_missing_file_and_a_short_one_are_faults_and_not_errors(ssd, arena):
    write = written(arena)
    assert set(ssd.read(SHAPE, wanted(arena, write, range(5))).values()) == {Fault.MISSING}
    ssd.write([write])
    os.truncate(ssd.path(KEY, SHAPE.fingerprint), piece_offset(SHAPE, 3))
    assert set(ssd.read(SHAPE, wanted(arena, write, range(5))).values()) == {Fault.CORRUPT}


def test_a_chunk_that_cannot_be_written_leaves_nothing_and_does_not_harm_its_group(ssd, arena):
    good, bad = written(arena), written(arena, OTHER_KEY)
    ssd.path(OTHER_KEY, SHAPE.fingerprint).mkdir(parents=True)  # a rename onto it must fail
    assert ssd.write([good, bad]) == [Wrote.OK, Wrote.FAILED]
    assert [p.name for p in ssd.path(KEY, SHAPE.fingerprint).parent.iterdir() if p.is_file()] == [KEY.hex()]


def test_a_disk_that_fails_is_a_fault_when_read_and_a_refusal_when_written(tmp_path, arena):
    disk = FakeFileIo(arena)
    ssd = SsdTier(tmp_path / "ssd", arena, KEYS, disk, disk)
    write = written(arena)
    assert ssd.write([write]) == [Wrote.OK]
    disk.error = OSError(errno.EIO, "medium error")
    assert set(ssd.read(SHAPE, wanted(arena, write, range(5))).values()) == {Fault.MEDIUM}
    disk.error = OSError(errno.EAGAIN, "busy")
    assert set(ssd.read(SHAPE, wanted(arena, write, range(5))).values()) == {Fault.UNAVAILABLE}
    disk.error = OSError(errno.ENOSPC, "full")
    assert ssd.write([written(arena, OTHER_KEY)]) == [Wrote.FULL]
    assert [p.name for p in ssd.path(KEY, SHAPE.fingerprint).parent.iterdir()] == [KEY.hex()]
    disk.error = None
    assert ssd.read(SHAPE, wanted(arena, write, range(5))) == {}
    assert_same(arena, write, wanted(arena, write, range(5)))


@pytest.mark.parametrize("direct", ["auto", "off"])
def test_pieces_of_whole_pages_come_back_past_the_page_cache_and_through_it(file_io, arena, tmp_path, direct):
    ssd = SsdTier(tmp_path / "ssd", arena, KEYS, file_io, file_io, direct)
    assert ssd.direct == (direct == "auto" and direct_works(tmp_path))
    writes = [written(arena, bytes([n]) * 32, n * ROUND.chunk_bytes, ROUND) for n in range(20)]
    assert ssd.write(writes) == [True] * 20
    for write in writes:
        for layers in (range(5), [1, 2], [4]):
            pieces = wanted(arena, write, layers)
            arena.view[2 * MIB : 3 * MIB] = bytes(MIB)
            assert ssd.read(ROUND, pieces) == {}
            assert_same(arena, write, pieces)
    ((shape, keys),) = ssd.recover().listed
    assert (shape, set(keys)) == (ROUND, {w.key for w in writes})
    ssd.close()


def test_many_reads_under_way_each_answer_once(ssd, arena):
    writes = [written(arena, bytes([n]) * 32, n * ROUND.chunk_bytes, ROUND) for n in range(10)]
    assert ssd.write(writes) == [True] * 10
    ssd.delete(writes[3].key, ROUND.fingerprint)
    answers: queue.SimpleQueue[tuple[int, dict[int, Fault]]] = queue.SimpleQueue()
    for turn in range(50):
        pieces = wanted(arena, writes[turn % 10], [turn % 5], 2 * MIB + turn * ROUND.piece_bytes)
        ssd.begin_read(ROUND, pieces, lambda faults, turn=turn: answers.put((turn, faults)))
    answered = dict(answers.get(timeout=30) for _ in range(50))
    assert answered == {turn: {0: Fault.MISSING} if turn % 10 == 3 else {} for turn in range(50)}


class Joining(ThreadFileIo):
    """Joins all that waits, and fails for whoever asks for a certain file: as one transfer without saying so, by itself
    with its error."""

    threads, depth, joined_bytes = 1, 32, 1 << 30

    def __init__(self, arena, bad: Path) -> None:
        super().__init__(arena)
        self.bad = bad
        self.joined: list[int] = []

    def begin(self, operation, fd, parts, header=b""):
        if operation == "READ" and os.path.samestat(os.fstat(fd), self.bad.stat()):
            raise OSError(errno.EIO, "medium error")
        return super().begin(operation, fd, parts, header)

    def begin_joined(self, reads):
        self.joined.append(len(reads))
        return super().begin_joined(reads)


def test_a_bad_file_among_reads_that_are_joined_is_not_held_against_the_others(tmp_path, arena):
    writes = [written(arena, bytes([n]) * 32, n * ROUND.chunk_bytes, ROUND) for n in range(10)]
    plain = ThreadFileIo(arena)
    ssd = SsdTier(tmp_path / "ssd", arena, KEYS, plain, plain)
    assert ssd.write(writes) == [True] * 10
    ssd.close()
    disk = Joining(arena, ssd.path(writes[4].key, ROUND.fingerprint))
    ssd = SsdTier(tmp_path / "ssd", arena, KEYS, disk, disk)
    ssd.delete(writes[3].key, ROUND.fingerprint)
    os.truncate(ssd.path(writes[5].key, ROUND.fingerprint), piece_offset(ROUND, 1))
    flipped = ssd.path(writes[6].key, ROUND.fingerprint)
    data = bytearray(flipped.read_bytes())
    data[piece_offset(ROUND, 1) + 9] ^= 4
    flipped.write_bytes(data)
    expected = {
        3: dict.fromkeys((0, 1), Fault.MISSING),
        4: dict.fromkeys((0, 1), Fault.MEDIUM),
        5: {1: Fault.CORRUPT, 0: Fault.CORRUPT},
    }
    expected[6] = {1: Fault.CORRUPT}
    held, answers = threading.Event(), queue.SimpleQueue()
    # the others wait for the thread, and are taken together
    ssd.begin_read(ROUND, wanted(arena, writes[0], [0]), lambda faults: held.wait(30))
    pieces = [wanted(arena, write, [0, 1], 2 * MIB + n * ROUND.chunk_bytes) for n, write in enumerate(writes)]
    for n, wants in enumerate(pieces):
        ssd.begin_read(ROUND, wants, lambda faults, n=n: answers.put((n, faults)))
    held.set()
    assert dict(answers.get(timeout=30) for _ in writes) == {n: expected.get(n, {}) for n in range(10)}
    assert max(disk.joined) > 1
    for n in set(range(10)) - expected.keys():
        assert_same(arena, writes[n], pieces[n])
    ssd.close()


@pytest.mark.parametrize("direct", ["auto", "on"])
def test_what_the_page_cache_holds_is_taken_from_there_unless_it_may_not(tmp_path, arena, direct):
    disk = FakeFileIo(arena)
    ssd = SsdTier(tmp_path / "ssd", arena, KEYS, disk, disk, direct)
    write = written(arena, shape=ROUND)
    assert ssd.write([write]) == [Wrote.OK]
    path = ssd.path(write.key, ROUND.fingerprint)
    with path.open("rb") as file:
        file.read()  # as the copy to the blob tier does
        if not page_cache.holds(file.fileno(), 0, ROUND.chunk_bytes):
            pytest.skip("this kernel or file system does not say what its page cache holds")
        disk.error = OSError(errno.EIO, "the disk was asked")
        pieces = wanted(arena, write, range(1, 5), 2 * MIB)
        assert ssd.read(ROUND, pieces) == ({} if direct == "auto" else dict.fromkeys(range(4), Fault.MEDIUM))
        if direct == "auto":
            assert_same(arena, write, pieces)
        os.posix_fadvise(file.fileno(), 0, 4096 + ROUND.piece_bytes, os.POSIX_FADV_DONTNEED)
        assert not page_cache.holds(file.fileno(), 0, ROUND.chunk_bytes)
        assert ssd.read(ROUND, wanted(arena, write, [0], 2 * MIB)) == {0: Fault.MEDIUM}
    ssd.close()


def test_a_read_that_is_given_up_before_it_begins_is_left_out(ssd, arena):
    write = written(arena)
    assert ssd.write([write]) == [True]
    answers: queue.SimpleQueue[dict[int, Fault]] = queue.SimpleQueue()
    pieces = wanted(arena, write, range(5), 2 * MIB)
    before = bytes(arena.view[pieces[0].offset : pieces[0].offset + SHAPE.piece_bytes])
    ssd.begin_read(SHAPE, pieces, answers.put, {}, lambda: True)
    assert answers.get(timeout=30) == dict.fromkeys(range(5), Fault.CANCELLED)
    assert arena.view[pieces[0].offset : pieces[0].offset + SHAPE.piece_bytes] == before


def test_direct_io_that_the_file_system_refuses_falls_back_or_stops_the_start(tmp_path, arena, monkeypatch):
    disk = FakeFileIo(arena)
    # as a file system without it does, open() answers with an error
    monkeypatch.setattr(os, "O_DIRECT", os.O_DIRECTORY)
    assert not SsdTier(tmp_path / "ssd", arena, KEYS, disk, disk).direct
    with pytest.raises(ConfigError, match=r"kv.direct_io = 'on'.*set kv.direct_io: auto or off"):
        SsdTier(tmp_path / "ssd", arena, KEYS, disk, disk, "on")
