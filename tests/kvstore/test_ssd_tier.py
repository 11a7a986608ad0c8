"""The SSD tier: what is committed comes back, whatever else lies on the disk; with each way of moving bytes."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from kvstore.core.events import Fault
from kvstore.tiers import nixl
from kvstore.tiers.file_io import NixlFileIo, ThreadFileIo
from kvstore.tiers.format import object_bytes, piece_offset
from kvstore.tiers.ssd import SsdTier
from tests.kvstore.fake_tiers import FakeFileIo
from tests.kvstore.tier_house import KEY, OTHER_KEY, SHAPE, arena, assert_same, wanted, written

__all__ = ["arena"]


@pytest.fixture(params=["threads", "nixl", "fake"])
def ssd(request: pytest.FixtureRequest, tmp_path: Path, arena) -> SsdTier:
    nixl.set_environment("lo")
    if request.param == "nixl":
        made = NixlFileIo(arena, f"test-{time.monotonic_ns()}")
    else:
        made = (ThreadFileIo if request.param == "threads" else FakeFileIo)(arena)
    return SsdTier(tmp_path / "ssd", arena, made, made)


def test_a_chunk_comes_back_from_the_ssd_whole_and_in_parts(ssd, arena):
    write = written(arena)
    assert ssd.write([write]) == [True]
    for layers in (range(5), range(2), range(3, 5)):
        pieces = wanted(write, layers)
        assert ssd.read(SHAPE, pieces) == {}
        assert_same(arena, write, pieces)


def test_recovery_finds_what_is_whole_and_deletes_the_rest(ssd, arena):
    good, short, flipped = written(arena), written(arena, b"s" * 32), written(arena, b"h" * 32)
    assert ssd.write([good, short, flipped]) == [True] * 3
    path = ssd.path(short.key, SHAPE.fingerprint)
    os.truncate(path, object_bytes(SHAPE) - 1)
    header = ssd.path(flipped.key, SHAPE.fingerprint)
    header.write_bytes(header.read_bytes()[:40] + b"\x55" + header.read_bytes()[41:])
    ssd.path(b"r" * 32, SHAPE.fingerprint).write_bytes(path.parent.joinpath(good.key.hex()).read_bytes())  # another chunk's name
    (path.parent / "not-hexadecimal").write_bytes(b"")
    (path.parent / (b"t" * 32).hex()).with_suffix(".part").write_bytes(b"torn")
    recovery = ssd.recover()
    assert [(c.key, c.shape, c.checksums) for c in recovery.copies] == [(KEY, SHAPE, good.checksums)]
    assert recovery.deleted == 5
    assert [p.name for p in path.parent.iterdir()] == [KEY.hex()]


def test_a_flipped_bit_in_a_piece_is_that_pieces_fault_only(ssd, arena):
    write = written(arena)
    ssd.write([write])
    path = ssd.path(KEY, SHAPE.fingerprint)
    data = bytearray(path.read_bytes())
    data[piece_offset(SHAPE, 2) + 9] ^= 4
    path.write_bytes(data)
    assert ssd.read(SHAPE, wanted(write, range(5))) == {2: Fault.CORRUPT}


def test_a_missing_file_and_a_short_one_are_faults_and_not_errors(ssd, arena):
    write = written(arena)
    assert set(ssd.read(SHAPE, wanted(write, range(5))).values()) == {Fault.MISSING}
    ssd.write([write])
    os.truncate(ssd.path(KEY, SHAPE.fingerprint), piece_offset(SHAPE, 3))
    assert set(ssd.read(SHAPE, wanted(write, range(5))).values()) == {Fault.CORRUPT}


def test_a_chunk_that_cannot_be_written_leaves_nothing_and_does_not_harm_its_group(ssd, arena):
    good, bad = written(arena), written(arena, OTHER_KEY)
    ssd.path(OTHER_KEY, SHAPE.fingerprint).mkdir(parents=True)  # a rename onto it must fail
    assert ssd.write([good, bad]) == [True, False]
    assert [p.name for p in ssd.path(KEY, SHAPE.fingerprint).parent.iterdir() if p.is_file()] == [KEY.hex()]


def test_a_disk_that_fails_is_a_fault_when_read_and_a_refusal_when_written(tmp_path, arena):
    disk = FakeFileIo(arena)
    ssd = SsdTier(tmp_path / "ssd", arena, disk, disk)
    write = written(arena)
    assert ssd.write([write]) == [True]
    disk.error = OSError(errno.EIO, "medium error")
    assert set(ssd.read(SHAPE, wanted(write, range(5))).values()) == {Fault.CORRUPT}
    disk.error = OSError(errno.EAGAIN, "busy")
    assert set(ssd.read(SHAPE, wanted(write, range(5))).values()) == {Fault.UNAVAILABLE}
    disk.error = OSError(errno.ENOSPC, "full")
    assert ssd.write([written(arena, OTHER_KEY)]) == [False]
    assert [p.name for p in ssd.path(KEY, SHAPE.fingerprint).parent.iterdir()] == [KEY.hex()]
    disk.error = None
    assert ssd.read(SHAPE, wanted(write, range(5))) == {}
    assert_same(arena, write, wanted(write, range(5)))
